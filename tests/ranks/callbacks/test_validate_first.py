"""A validation before the first step."""

from __future__ import annotations

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rlhf_lightning.callbacks import RewardCurve, ValidateFirst
from rlhf_lightning.strategies import Local
from tests.ranks.callbacks.test_sampled_validation import Weights, grpo, prompts, validated
from tests.unit.callbacks.module import Tiny, fit, trainer_in


class Counted(Tiny):
    """Counts the batches that it validates, by step, the sanity check's too; an epoch has 8 steps."""

    def on_validation_batch_start(self, batch: object, batch_idx: int, dataloader_idx: int = 0) -> None:
        counts = self.counts = getattr(self, "counts", {})
        counts[self.global_step] = counts.get(self.global_step, 0) + 1


def test_it_is_step_0_of_every_logger_and_curve(tmp_path: Path) -> None:
    curve, module = RewardCurve(), Counted()
    loggers = [CSVLogger(tmp_path, name="", version="")]
    fit(trainer_in(tmp_path, [curve, ValidateFirst()], steps=10, loggers=loggers), module)
    assert curve.state_dict()["val/reward"] == [(step, float(step)) for step in (0, 2, 4, 6, 8, 10)]
    assert [step for step, _ in curve.state_dict()["reward/mean"]] == list(range(1, 11))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    first, *later = [(row["step"], row["val/reward"]) for row in rows if row["val/reward"]]
    assert first == ("0", "0.0")
    assert [float(value) for _, value in later] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert set(module.counts.values()) == {2}, "no sanity check beside it, and an epoch begins after step 8"


def test_whoever_goes_on_does_not_validate_first(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit(trainer_in(tmp_path, [ValidateFirst(), saver], checkpoints=True), Tiny())
    module = Counted()
    fit(trainer_in(tmp_path, [ValidateFirst()], steps=6), module, str(tmp_path / "step=3.ckpt"))
    assert module.counts == {4: 2, 6: 2}


def test_an_early_stop_counts_it(tmp_path: Path) -> None:
    """`val/reward` rises, so that by `min` the first is the best: one worse is one less."""
    steps = []
    for callbacks in ([], [ValidateFirst()]):
        trainer = trainer_in(tmp_path, [EarlyStopping("val/reward", patience=1), *callbacks], steps=8)
        fit(trainer, Tiny())
        steps.append(trainer.global_step)
    assert steps == [4, 2]


class Kept(Callback):
    """The held-out reward of each validation."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert trainer.validating
        self.rewards.append(float(trainer.callback_metrics["val/reward"]))


def test_the_models_as_they_were_and_learning_as_without(tmp_path: Path) -> None:
    alone = pl.Trainer(strategy=Local(), logger=False, default_root_dir=tmp_path)
    (before,) = alone.validate(grpo(tmp_path), datamodule=prompts(), verbose=False)
    plain, both, kept = Weights(), Weights(), Kept()
    validated(tmp_path, plain, num_sanity_val_steps=0)
    validated(tmp_path, ValidateFirst(), kept, both)
    first, last = kept.rewards
    assert first == before["val/reward"]
    assert first != last
    for name, weight in plain.found.items():
        assert weight.equal(both.found[name])


def test_nothing_to_validate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ValidateFirst: with .* nothing is ever validated"):
        validated(tmp_path, ValidateFirst(), limit_val_batches=0)
