"""Every offline algorithm: from rows in a file to a lower loss, in this process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import DPO, KTO, SFT, CostModel, ProcessRewardModel, RewardModel, SimPO
from rlhf_lightning.data import CompletionData, PreferenceData, StepData, UnpairedData
from rlhf_lightning.functional import DPOLoss
from rlhf_lightning.spec import OptimizerSpec
from rlhf_lightning.workers import Actor, Scorer
from tests.unit.algos.small import run, write_model, write_rows

NUM_ROWS = 12
FAST = OptimizerSpec(lr=3e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows that serve all: the better answer is in capitals."""
    every: list[dict[str, object]] = [
        {
            "prompt": f"Question {n}: ",
            "response": "YES" if n % 2 else "no way",
            "label": bool(n % 2),
            "chosen": "YES " * (1 + n % 3),
            "rejected": "no " * (1 + n % 2),
            "chosen_safe": True,
            "rejected_safe": n % 3 == 0,
            "steps": ["RIGHT", "wrong", "RIGHT"][: 1 + n % 3],
            "labels": [1, 0, 1][: 1 + n % 3],
        }
        for n in range(NUM_ROWS)
    ]
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", every)


def actor(path: str) -> Actor:
    return Actor(path=path, optimizer=FAST)


def scorer(path: str) -> Scorer:
    return Scorer(path=path, optimizer=FAST)


Make = Callable[[str], RLHFAlgorithm]
Data = Callable[[str], pl.LightningDataModule]


def pairs(path: str) -> PreferenceData:
    safe = ("chosen_safe", "rejected_safe")
    return PreferenceData(path=path, batch_size=NUM_ROWS - 2, val_rows=2, safe_fields=safe)


CASES: dict[str, tuple[Make, Data, str]] = {
    "sft": (lambda p: SFT(actor=actor(p)), lambda p: CompletionData(path=p, batch_size=NUM_ROWS), "sft/loss"),
    "reward": (lambda p: RewardModel(reward=scorer(p)), pairs, "reward_model/loss"),
    "cost": (lambda p: CostModel(cost=scorer(p)), pairs, "cost_model/loss"),
    "process": (
        lambda p: ProcessRewardModel(reward=scorer(p)),
        lambda p: StepData(path=p, batch_size=NUM_ROWS),
        "process_reward/loss",
    ),
    "dpo": (lambda p: DPO(actor=actor(p)), pairs, "dpo/loss"),
    "ipo": (lambda p: DPO(actor=actor(p), loss=DPOLoss(kind="ipo")), pairs, "dpo/loss"),
    "hinge": (lambda p: DPO(actor=actor(p), loss=DPOLoss(kind="hinge")), pairs, "dpo/loss"),
    "smoothed": (lambda p: DPO(actor=actor(p), loss=DPOLoss(label_smoothing=0.1)), pairs, "dpo/loss"),
    "kto": (lambda p: KTO(actor=actor(p)), lambda p: UnpairedData(path=p, batch_size=NUM_ROWS), "kto/loss"),
    "simpo": (lambda p: SimPO(actor=actor(p)), pairs, "simpo/loss"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_falls(name: str, model: str, rows: str) -> None:
    make, data, metric = CASES[name]
    kept = run(make(model), data(rows), steps=5)
    for numbers in kept.numbers:
        assert all(math.isfinite(value) for value in numbers.values()), numbers
    losses = [numbers[metric] for numbers in kept.numbers]
    assert losses[-1] < losses[0] - 0.05 * abs(losses[0])  # found: 0.14 (SFT) to 0.97 of it


def test_pairs_stay_together_in_mini_batches(model: str, rows: str) -> None:
    small = RewardModel(reward=scorer(model), mini_batch_size=3)
    kept = run(small, pairs(rows), steps=4)
    assert kept.numbers[-1]["reward_model/accuracy"] == 1


def test_held_out_pairs_are_measured(model: str, rows: str, tmp_path: Path) -> None:
    from rlhf_lightning.strategies import Local

    trainer = pl.Trainer(
        strategy=Local(),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    (found,) = trainer.validate(RewardModel(reward=scorer(model)), datamodule=pairs(rows), verbose=False)
    assert {"val/loss", "val/accuracy", "val/margin"} <= set(found)
