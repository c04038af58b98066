"""TRL's GRPOTrainer at its best on a CPU: its default loss, one update an iteration, no second forward.

Started plainly it is one process; under torchrun the 64 sequences are shared (DDP over gloo).
"""

from datasets import Dataset
from iterations import Run, Stopwatch, from_command_line
from trl import GRPOConfig, GRPOTrainer
from trl_setup import Laps, bare_arguments, policy, report, tokenizer
from workload import RESPONSE_TOKENS, SAMPLES_PER_PROMPT, read_prompts, reward


def rule(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
    """The workload's reward in TRL's form.

    Raises:
        RuntimeError: where a response is not RESPONSE_TOKENS long: the rate would count absent tokens.
    """
    lengths = {len(ids) for ids in completion_ids}
    if lengths != {RESPONSE_TOKENS}:
        raise RuntimeError(f"responses of {sorted(lengths)} tokens, not {RESPONSE_TOKENS}")
    return reward(completions)


def configuration(run: Run) -> GRPOConfig:
    """8 prompts x 8 samples, one update an iteration.

    beta is TRL's default (0, without a reference) unless `run.kl` is given.
    """
    return GRPOConfig(
        **bare_arguments(run),
        max_steps=run.warmup + run.iterations,
        num_generations=SAMPLES_PER_PROMPT,
        steps_per_generation=run.micro_batches,
        num_iterations=1,
        max_completion_length=RESPONSE_TOKENS,
        beta=run.kl or 0.0,
        logging_strategy="no",
    )


def main() -> None:
    """Train, time and print."""
    run, watch = from_command_line(), Stopwatch()
    trainer = GRPOTrainer(
        model=policy(run),
        reward_funcs=rule,
        args=configuration(run),
        train_dataset=Dataset.from_dict({"prompt": read_prompts(run.workload.prompts)}),
        processing_class=tokenizer(run),
        callbacks=[Laps(watch)],
    )
    trainer.train()
    report(watch, run)


if __name__ == "__main__":
    main()
