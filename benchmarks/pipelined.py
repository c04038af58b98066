"""Experience in portions against whole batches: what is saved, beside what the critical path predicts.

    python -m benchmarks.pipelined

PPO with a reward model, the actor on one device and the models that score on another, responses of very
uneven length. The prediction takes the seconds of every call from a run in one process, where nothing
overlaps, and schedules them on the two devices: a call starts once its device is free and its rows are there.
Prints both, and writes results/pipelined.json.
"""

import argparse
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
from transformers import LlamaConfig

from benchmarks import environments
from benchmarks.spread import machine, spread
from rlhf_lightning.algos import PPO
from rlhf_lightning.callbacks import Trace
from rlhf_lightning.controller import CallReport
from rlhf_lightning.controller.cluster import ResourcePool
from rlhf_lightning.data import TaskData
from rlhf_lightning.data.tokenizer import embedded_directory
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Critic, Reward, Settings

ROWS, RESPONSE, STOPS = 64, 96, 8
"""Prompts of an iteration; most tokens of a response; tokens of 264 that end one: about every 30th."""
SCORING = ("compute_values", "compute_ref_log_prob", "compute_reward")


class ActorAlone(Strategy):
    """{actor} and {everything else}, a device each."""

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """Two pools."""
        others = tuple(role for role in roles if role != "actor")
        return [ResourcePool("actor", 1, ("actor",)), ResourcePool("others", 1, others)]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Some iterations."""

    seconds: list[float]
    """Of each iteration after the first."""
    calls: list[list[CallReport]]
    """Of each of them, in the order of their start."""
    starts: list[float]


def write_model(directory: Path, layers: int) -> str:
    """A Llama that is initialised when it is loaded, and the embedded tokenizer."""
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=264,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
        dtype="float32",
    ).save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).write_bytes((embedded_directory() / file).read_bytes())
    return str(directory)


def run(strategy: Strategy, path: str, iterations: int) -> Ran:
    """Train for some iterations, and one before them."""
    trace = Trace(os.devnull)
    algorithm = PPO(
        actor=Actor(
            path=path, sampling=Sampling(max_new_tokens=RESPONSE, stop_token_ids=tuple(range(STOPS)))
        ),
        critic=Critic(),
        reward=Reward(path=path, functions=None),
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=iterations + 1,
        callbacks=[trace],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainer.fit(algorithm, datamodule=TaskData(num_rows=ROWS, num_val_rows=2, batch_size=ROWS))
    kept = trace.iterations[1:]
    calls = [
        sorted((c for c in trace.calls if a <= c.started_s < a + s), key=lambda call: call.started_s)
        for a, s in kept
    ]
    return Ran(seconds=[s for _, s in kept], calls=calls, starts=[a for a, _ in kept])


def predicted(calls: Sequence[CallReport], started_s: float, seconds: float) -> float:
    """Seconds of an iteration on the two devices, from its calls in one process."""
    free: defaultdict[str, float] = defaultdict(float)
    answered: list[float] = []
    count: defaultdict[str, int] = defaultdict(int)
    updates = [call for call in calls if call.method.startswith("update_")]
    before = [call for call in calls if call not in updates]
    for call in before:
        device = "actor" if call.role == "actor" else "others"
        ready = answered[count[call.method]] if call.method in SCORING else 0.0
        count[call.method] += 1
        free[device] = max(free[device], ready) + call.seconds
        if call.method == "generate_sequences":
            answered.append(free[device])
    scored = max(free.values())
    busy = sum(call.seconds for call in calls)
    controller = seconds - busy  # nothing overlaps there: what no call accounts for is the controller's
    ends = dict.fromkeys(("actor", "others"), scored)
    for call in updates:
        ends["actor" if call.role == "actor" else "others"] += call.seconds
    return max(ends.values()) + controller


def main() -> None:
    """Measure and predict, print, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--portions", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), args.layers)
        for portions in (1, args.portions):
            settings = Settings(portions=portions)
            here = run(Local(settings=settings, num_threads=1), path, args.iterations)
            guesses = [
                predicted(c, a, s) for c, a, s in zip(here.calls, here.starts, here.seconds, strict=True)
            ]
            apart = run(ActorAlone(settings=settings), path, args.iterations)
            found[portions] = {
                "predicted_s": statistics.median(guesses),
                "measured_s": statistics.median(apart.seconds),
                "measured_low_s": spread(apart.seconds).low,
                "measured_high_s": spread(apart.seconds).high,
            }
            one = found[portions]
            span = f"[{one['measured_low_s']:.2f} .. {one['measured_high_s']:.2f}]"
            guess, real = one["predicted_s"], one["measured_s"]
            print(f"portions {portions}: predicted {guess:.2f} s, measured {real:.2f} s {span}", flush=True)
    saved = {
        name: 1 - found[args.portions][f"{name}_s"] / found[1][f"{name}_s"]
        for name in ("predicted", "measured")
    }
    print(f"saved: predicted {saved['predicted']:.1%}, measured {saved['measured']:.1%}")
    result = {"machine": machine(), "settings": vars(args), "portions": found, "saved": saved}
    print(f"written: {environments.write_result('pipelined', result)}")


if __name__ == "__main__":
    main()
