"""Errors that a command shows on one line: of libraries, and below the user's own code."""

from __future__ import annotations

import re

import pytest
import torch
from jsonargparse.typing import Path_fr
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from wandb.errors import UsageError

from rlhf_lightning.algos import GRPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.user_errors import library_error, place_of


def test_what_a_library_refuses_is_one_line() -> None:
    stopping = EarlyStopping("val/rewad")
    trainer = Trainer(logger=False, enable_checkpointing=False, callbacks=[stopping])
    with pytest.raises(RuntimeError) as lightnings:
        stopping._run_early_stopping_check(trainer)
    assert library_error(lightnings.value).startswith("Early stopping conditioned on metric `val/rewad`")
    with pytest.raises(RuntimeError) as ours:
        raise RuntimeError("a bug")
    assert not library_error(ours.value)
    with pytest.raises(UsageError) as wandbs:
        raise UsageError("No API key configured.\nUse `wandb login` to log in.")
    with pytest.raises(TypeError, match="exist") as places:
        Path_fr("nowhere.yaml")
    assert library_error(places.value).startswith("File does not exist: '")
    said = "wandb: No API key configured. Use `wandb login` to log in. Or try --trainer.logger.offline true."
    assert library_error(wandbs.value) == said


class Unpacks(GRPO):
    """Fails in a way that says nothing about where."""

    def step(self, batch: Batch) -> Metrics:
        _, _, _ = batch["prompt_ids"].shape
        return Metrics()

    def setup(self, stage: str) -> None:
        """Right, and above what may be wrong."""
        raise ValueError(f"{stage}: an option of the run.")


def test_an_error_below_a_step_is_said_with_its_place() -> None:
    with pytest.raises(ValueError, match="not enough values") as caught:
        Unpacks().step(Batch.of({"prompt_ids": torch.zeros(2, 3)}))
    caught.value.__traceback__ = caught.tb.tb_next  # as where the command catches it
    assert re.fullmatch(r"\S*test_user_errors\.py, line \d+, in step", place_of(caught.value))
    with pytest.raises(ValueError, match="an option") as refused:
        Unpacks().setup("fit")
    refused.value.__traceback__ = refused.tb.tb_next
    assert not place_of(refused.value)
    with pytest.raises(ValueError, match="other lengths") as ours:
        _ = Batch.of({"a": torch.zeros(2), "b": torch.zeros(3)})
    ours.value.__traceback__ = ours.tb.tb_next
    assert not place_of(ours.value)
