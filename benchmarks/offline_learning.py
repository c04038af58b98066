"""Does every offline algorithm learn, and a student? The embedded model is told which sorted string is right.

    python -m benchmarks.offline_learning    prints first and last numbers, draws docs/images/learning-*.svg

A wrong answer has two neighbouring digits exchanged. No row is seen twice, so the curves are of new rows. The
student's teacher is the model that SFT makes.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LambdaCallback

from benchmarks import environments
from benchmarks.learning import curve_picture, smooth
from benchmarks.small_runs import quiet_trainer
from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import (
    DPO,
    KTO,
    SFT,
    CostModel,
    Distillation,
    ProcessRewardModel,
    RewardModel,
    SimPO,
)
from rlhf_lightning.data import CompletionData, PreferenceData, PromptData, StepData, UnpairedData
from rlhf_lightning.data.tasks import sort_digits
from rlhf_lightning.functional import DPOLoss
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Scorer

BATCH = 64
Make = Callable[[], RLHFAlgorithm]
Data = Callable[[str], pl.LightningDataModule]


def actor(lr: float, warmup_steps: int = 0) -> Actor:
    return Actor(optimizer=OptimizerSpec(lr=lr, warmup_steps=warmup_steps))


def scorer(lr: float) -> Scorer:
    return Scorer(optimizer=OptimizerSpec(lr=lr))


def pairs(path: str) -> PreferenceData:
    return PreferenceData(path=path, batch_size=BATCH, safe_fields=("chosen_safe", "rejected_safe"))


@dataclass(frozen=True)
class Entry:
    """An algorithm, its data, and the number that is to rise (or, for a loss, to fall)."""

    make: Make
    data: Data
    metric: str


ENTRIES: Mapping[str, Entry] = {
    "sft": Entry(
        lambda: SFT(actor=actor(1e-4, warmup_steps=15)),
        lambda path: CompletionData(path=path, batch_size=BATCH, response_field="chosen"),
        "sft/loss",
    ),
    "rewardmodel": Entry(lambda: RewardModel(reward=scorer(1e-3)), pairs, "reward_model/accuracy"),
    "costmodel": Entry(lambda: CostModel(cost=scorer(1e-3)), pairs, "cost_model/accuracy"),
    "processrewardmodel": Entry(
        lambda: ProcessRewardModel(reward=scorer(1e-3)),
        lambda path: StepData(path=path, batch_size=BATCH, separator=""),
        "process_reward/accuracy",
    ),
    "dpo": Entry(lambda: DPO(actor=actor(2e-4)), pairs, "dpo/accuracy"),
    "dpo-ipo": Entry(lambda: DPO(actor=actor(2e-4), loss=DPOLoss(kind="ipo")), pairs, "dpo/accuracy"),
    "dpo-hinge": Entry(lambda: DPO(actor=actor(2e-4), loss=DPOLoss(kind="hinge")), pairs, "dpo/accuracy"),
    "kto": Entry(
        lambda: KTO(actor=actor(2e-4)),
        lambda path: UnpairedData(path=path, batch_size=BATCH, from_pairs=True),
        "kto/margin",
    ),
    "simpo": Entry(lambda: SimPO(actor=actor(2e-4)), pairs, "simpo/accuracy"),
    "distillation": Entry(
        lambda: Distillation(
            actor=Actor(optimizer=OptimizerSpec(lr=1e-4), sampling=Sampling(max_new_tokens=8))
        ),
        lambda path: PromptData(path=path, batch_size=BATCH, answer_field="chosen"),
        "distillation/loss",
    ),
}


def row(index: int) -> dict[str, object]:
    """A prompt, its right answer and one with two digits exchanged, whose digits are the steps."""
    task, rng = sort_digits(0, index), random.Random(index)  # noqa: S311
    right = str(task["answer"])
    places = [i for i in range(len(right) - 1) if right[i] != right[i + 1]]
    if not places:
        return row(index + 1_000_000)
    place = rng.choice(places)
    wrong = right[:place] + right[place + 1] + right[place] + right[place + 2 :]
    return {
        "prompt": task["prompt"],
        "chosen": right,
        "rejected": wrong,
        "chosen_safe": True,
        "rejected_safe": False,
        "steps": list(wrong),
        "labels": [int(a == b) for a, b in zip(right, wrong, strict=True)],
    }


class Watch(pl.Callback):
    """Notes a metric of every iteration."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Note it."""
        self.values.append(float(trainer.logged_metrics[self.metric]))


def teacher(path: str, steps: int) -> str:
    """A directory, beside the rows, of the model that SFT makes of them."""
    entry, directory = ENTRIES["sft"], Path(path).parent / "teacher"
    algorithm = cast(SFT, entry.make())
    export = LambdaCallback(on_train_end=lambda *_: algorithm.actor.export(directory=directory).fetch())
    trainer = quiet_trainer(Local(), ".", steps=steps, callbacks=[export])
    trainer.fit(algorithm, datamodule=entry.data(path))
    return str(directory)


def play(entry: Entry, path: str, steps: int) -> list[float]:
    """Train once; the metric of every iteration."""
    pl.seed_everything(0, verbose=False)
    algorithm, watch = entry.make(), Watch(entry.metric)
    if isinstance(algorithm, Distillation):
        algorithm.teacher = replace(algorithm.teacher, path=teacher(path, steps))
    trainer = quiet_trainer(Local(), ".", steps=steps, callbacks=[watch])
    trainer.fit(algorithm, datamodule=entry.data(path))
    return watch.values


def main() -> None:
    """Run, print, draw."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--algos", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "rows.jsonl")
        path.write_text("".join(json.dumps(row(i)) + "\n" for i in range(BATCH * args.steps)))
        for name in args.algos:
            entry = ENTRIES[name]
            values = play(entry, str(path), args.steps)
            first, last = values[0], smooth(values)[-1]
            print(f"{name:<20}{entry.metric:<26}{first:8.3f} -> {last:8.3f}", flush=True)
            if (last < first) != entry.metric.endswith("loss"):
                wrong.append(name)
            curve_picture(f"learning-{name}", {name: [values]}, label=entry.metric)
    print(f"NOT LEARNED: {', '.join(wrong)}" if wrong else "all learned")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
