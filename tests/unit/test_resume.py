"""Runs that cannot go on from a checkpoint are refused before any device starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from rlhf_lightning import checkpoint as files
from rlhf_lightning.callbacks import LastCheckpoint
from rlhf_lightning.checkpoint import columns_of
from rlhf_lightning.controller import Batch
from rlhf_lightning.data import TaskData
from rlhf_lightning.strategies import Local, OneStepOff
from tests.unit.algos.short import Started, grpo, trainer

OPTIONS: dict[str, object] = {"batch_size": 2, "num_rows": 6, "num_val_rows": 0}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of one of three iterations."""
    root = tmp_path_factory.mktemp("run")
    own = LastCheckpoint(root)
    run = trainer(Local(), root, callbacks=[own], enable_checkpointing=True)
    run.fit(grpo(), datamodule=TaskData(**OPTIONS))  # type: ignore[arg-type]
    return own.path


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "started"),
        ({"batch_size": 3}, r"data\.batch_size=3: .* begun with 2\. Resume with --data\.batch_size 2\."),
        ({"num_workers": 1}, r"data\.num_workers=1: .*Resume with --data\.num_workers 0"),
        ({"shuffle": False}, r"data\.shuffle=false: .*Resume with --data\.shuffle true"),
        ({"num_rows": 8}, "in the middle of 6 rows, the data has 8 now"),
    ],
)
def test_other_rows_than_those_of_the_epoch(
    written: Path, options: dict[str, object], says: str, tmp_path: Path
) -> None:
    data = TaskData(**{**OPTIONS, **options})  # type: ignore[arg-type]
    with pytest.raises((ValueError, RuntimeError), match=says):
        trainer(Started(), tmp_path, steps=3).fit(grpo(), datamodule=data, ckpt_path=written)


class StartedAhead(OneStepOff):
    """Fails once it is to start."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Refuse."""
        raise RuntimeError("started")


@pytest.mark.parametrize(
    ("group_size", "max_staleness", "says"),
    [
        (2, 3, "started"),
        (
            2,
            1,
            r"strategy\.max_staleness=1: .* with 2, .* 8 rows .*Type --strategy\.max_staleness 2\.",
        ),
        (4, 3, r"algo\.group_size=4: .* written with 2, .* Type --algo\.group_size 2\."),
    ],
)
def test_other_prompts_than_those_in_flight(
    written: Path, group_size: int, max_staleness: int, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "ahead.ckpt"
    shutil.copytree(written, path)
    rows = Batch.of({"prompt_ids": torch.ones(8, 1, dtype=torch.long)})
    files.write_state(
        path, {**files.read_state(path), "in_flight": columns_of(rows, what="x"), "max_staleness": 2}
    )
    algorithm = grpo()
    algorithm.group_size = group_size
    run = trainer(StartedAhead(max_staleness=max_staleness), tmp_path, steps=3)
    with pytest.raises((ValueError, RuntimeError), match=says):
        run.fit(algorithm, datamodule=TaskData(**OPTIONS), ckpt_path=path)  # type: ignore[arg-type]
