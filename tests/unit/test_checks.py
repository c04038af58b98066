"""What an algorithm refuses before anything is placed."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

import lightning.pytorch as pl
import pytest

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor


class Unjudged(RLHFAlgorithm):
    """Answers, and has nothing that scores answers."""

    actor: Actor = field(default_factory=lambda: Actor(sampling=Sampling(max_new_tokens=2)))

    def step(self, batch: Batch) -> Metrics:
        """Answer only."""
        self.actor.generate_sequences(batch)
        return Metrics()


class InItsOwnWay(Unjudged):
    """Validates without scores."""

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        """Nothing."""


class Started(Local):
    """Fails once it is to start."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Refuse."""
        raise RuntimeError("started")


def refusal(algorithm: RLHFAlgorithm, root: Path, *, held_out: int = 2, limit: int | None = None) -> str:
    run = pl.Trainer(
        strategy=Started(),
        logger=False,
        limit_val_batches=limit,
        default_root_dir=root,
        enable_checkpointing=False,
    )
    with pytest.raises((ValueError, RuntimeError)) as error:
        run.fit(algorithm, datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=held_out))
    return str(error.value)


def test_held_out_answers_need_a_reward(tmp_path: Path) -> None:
    told = refusal(Unjudged(), tmp_path)
    assert told.startswith("Unjudged has no field `reward: Reward`, which scores held-out answers.")


def test_without_held_out_rows_none_is_needed(tmp_path: Path) -> None:
    assert refusal(Unjudged(), tmp_path, held_out=0) == "started"
    assert refusal(Unjudged(), tmp_path, limit=0) == "started"
    assert refusal(InItsOwnWay(), tmp_path) == "started"
