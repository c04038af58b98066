"""Callbacks of Lightning look after a validation, however its interval is written."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from rlhf_lightning.data import TaskData
from rlhf_lightning.strategies import Local
from tests.unit.algos.short import grpo, trainer


@pytest.mark.parametrize(
    ("interval", "looks", "after"), [(1, 2, True), (1.0, 1, False), (2, 1, True), (timedelta(0), 2, True)]
)
def test_callbacks_look_after_a_validation_of_every_iteration(
    interval: float | timedelta, looks: int, *, after: bool, tmp_path: Path
) -> None:
    """As at an interval of 2 iterations: one of 1 Lightning takes for 1.0, the epoch, and a time is none."""
    stop = EarlyStopping("val/reward", patience=100)
    late = EarlyStopping("val/reward", mode="max", patience=100, check_on_train_epoch_end=True)
    best = ModelCheckpoint(tmp_path / "best", monitor="val/reward", mode="max", save_top_k=-1)
    mine = ModelCheckpoint(tmp_path / "mine", save_on_train_epoch_end=True)
    options = {"val_check_interval": interval, "limit_val_batches": 1, "callbacks": [stop, late, best, mine]}
    run = trainer(Local(), tmp_path, steps=2, enable_checkpointing=True, **options)
    run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=2))
    assert len(list((tmp_path / "best").iterdir())) == looks
    assert stop._check_on_train_epoch_end is not after
    assert mine._save_on_train_epoch_end
    assert late._check_on_train_epoch_end
