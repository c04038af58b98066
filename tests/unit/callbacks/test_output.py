"""Where callbacks cannot leave their files, a run is refused before any device starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from rlhf_lightning.callbacks import LastCheckpoint, PredictedTimes, RewardCurve, Rollouts, SampleTable, Trace
from rlhf_lightning.data import TaskData
from tests.unit.algos.short import Started, grpo, trainer

WRITERS: dict[str, Callable[[Path], Callback]] = {
    "LastCheckpoint": LastCheckpoint,
    "PredictedTimes": lambda path: PredictedTimes("a100-80gb", path=str(path / "times.jsonl")),
    "RewardCurve": lambda path: RewardCurve(path=str(path / "reward.png")),
    "Rollouts": lambda path: Rollouts(directory=str(path)),
    "SampleTable": lambda path: SampleTable(directory=str(path)),
    "Trace": lambda path: Trace(str(path / "trace.json")),
}


def said(callback: Callback, root: Path, *, tries: bool = False) -> str:
    """Why it does not start, or that it has."""
    options = {"limit_val_batches": None, "enable_checkpointing": True, "fast_dev_run": tries}
    run = trainer(Started(), root, steps=1, callbacks=[callback], **options)
    with pytest.raises((ValueError, RuntimeError)) as error:
        run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=2))
    return str(error.value)


@pytest.mark.parametrize("name", WRITERS)
def test_a_place_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    taken, free = tmp_path / "taken", tmp_path / "free"
    taken.touch()
    callback = WRITERS[name](taken / "deeper" / "out")
    assert said(callback, tmp_path).startswith(f"{name}: {taken / 'deeper' / 'out'} ")
    assert said(WRITERS[name](free / "out"), tmp_path) == "started"
    assert said(callback, tmp_path, tries=True) == "started"
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
