"""Whole iterations of our PPO and GRPO on the benchmark's workload."""

import json

from iterations import Run, Seconds, from_command_line


def measure(run: Run) -> Seconds:
    """Train `run.warmup + run.iterations` iterations of `run.algo` and return the seconds of the later ones.

    The settings are those of the peers: 1 epoch, 1 update an iteration, AdamW, temperature 1, no stop token,
    64 sequences (GRPO 8 prompts x 8 samples, no reference unless `run.kl` is given; PPO 64 prompts x 1 with
    a critic, a reference and KL in the reward, coefficient 0.05), `workload.reward`, fp32, `run.processes`
    devices.
    """
    raise NotImplementedError("ours_throughput.measure: waits for the trainer")


if __name__ == "__main__":
    print(json.dumps({"seconds": list(measure(from_command_line()).iterations)}))
