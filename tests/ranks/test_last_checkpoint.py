"""LastCheckpoint: what it is given, and whose checkpoint it replaces; `tests/ray` resumes with it."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from rlhf_lightning import checkpoint as files
from rlhf_lightning.algos import GRPO
from rlhf_lightning.callbacks import LastCheckpoint
from rlhf_lightning.data import TaskData
from rlhf_lightning.strategies import Local
from tests.unit.algos.short import grpo, trainer


class Watch(Callback):
    """Counts validations that were no better than the first, as EarlyStopping does, and may fail."""

    def __init__(self, *, fails_at: int = 0) -> None:
        self.fails_at = fails_at
        self.rows: list[list[int]] = []
        self.counted = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Mapping[str, Tensor], batch_idx: int
    ) -> None:
        if trainer.global_step == self.fails_at > 0:
            raise KeyError("it fails")
        self.rows.append(batch["row_ids"].tolist())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.counted += 1

    def state_dict(self) -> dict[str, int]:
        return {"counted": self.counted}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.counted = state_dict["counted"]


def fit(
    root: Path,
    steps: int,
    *,
    resume: Path | str | None = None,
    watch: Watch | None = None,
    every: int = 2,
    kind: type[GRPO] = GRPO,
    data: type[TaskData] = TaskData,
) -> None:
    """A run of a few iterations, which keeps every second one and the last, and validates where watched."""
    run = trainer(
        Local(),
        root,
        steps=steps,
        enable_checkpointing=True,
        limit_val_batches=1 if watch else 0,
        num_sanity_val_steps=0,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        callbacks=[*([watch] if watch else []), LastCheckpoint(root / "checkpoints", every_n_steps=every)],
    )
    run.fit(grpo(kind), datamodule=data(batch_size=2, num_rows=20, num_val_rows=2), ckpt_path=resume)


class Forks(Watch):
    """Makes a process that outlives the run, as a loader's worker does where the run is killed."""

    child = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Mapping[str, Tensor], batch_idx: int
    ) -> None:
        self.child = os.fork()
        if not self.child:
            signal.pause()


def kept(root: Path) -> dict[str, int]:
    """Iterations of each checkpoint, by its name."""
    found = (root / "checkpoints").iterdir()
    return {p.name: json.loads((p / "trainer.json").read_text())["state"]["global_step"] for p in found}


@pytest.mark.parametrize("number", [0, -1])
def test_never_is_no_number_of_iterations(number: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"every_n_steps={number}\): must be at least 1"):
        LastCheckpoint(tmp_path, every_n_steps=number)


def test_what_another_run_has_left_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, 3)
    assert kept(tmp_path) == {"last.ckpt": 3}
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, 1)
    assert kept(tmp_path) == {"last.ckpt": 1, "last-v1.ckpt": 3}
    assert "last.ckpt: this run does not go on from it; it is last-v1.ckpt now." in caplog.text
    fit(tmp_path, 2)
    assert kept(tmp_path) == {"last.ckpt": 2, "last-v1.ckpt": 3, "last-v2.ckpt": 1}


def test_what_a_run_that_was_killed_between_two_names_has_left_is_kept(tmp_path: Path) -> None:
    fit(tmp_path, 3)
    place = tmp_path / "checkpoints"
    (place / "last.ckpt").rename(place / "last-replaced.ckpt")
    fit(tmp_path, 1)
    assert kept(tmp_path) == {"last.ckpt": 1, "last-v1.ckpt": 3}
    (place / "last.ckpt").rename(place / "last-replaced.ckpt")
    fit(tmp_path, 2, resume="last")
    assert kept(tmp_path) == {"last.ckpt": 2, "last-v1.ckpt": 3}


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_last_is_none_of_an_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose checkpoint was renamed for one that could not be written, or was copied with its directory."""
    fit(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_state", full)
        with pytest.raises(OSError, match="No space left"):
            fit(tmp_path, 2)
    assert kept(tmp_path) == {"last-v1.ckpt": 3}
    fit(tmp_path, 2, resume="last")
    assert kept(tmp_path) == {"last.ckpt": 2, "last-v1.ckpt": 3}
    os.utime(tmp_path / "checkpoints" / "last-v1.ckpt")
    fit(tmp_path, 5, resume="last")
    assert kept(tmp_path) == {"last.ckpt": 5, "last-v1.ckpt": 3}


def test_a_run_that_fails_before_its_first_checkpoint_goes_on_from_none(tmp_path: Path) -> None:
    """It would go on from that of the run before, with its own options."""
    fit(tmp_path, 3)
    with pytest.raises(KeyError, match="it fails"):
        fit(tmp_path, 5, watch=Watch(fails_at=1))
    again = Watch()
    fit(tmp_path, 5, watch=again, resume="last")
    assert len(again.rows) == 5
    assert kept(tmp_path) == {"last.ckpt": 5, "last-v1.ckpt": 3}


def test_a_last_that_is_damaged_is_not_passed_over(tmp_path: Path) -> None:
    fit(tmp_path, 3)
    (tmp_path / "checkpoints" / "last.ckpt" / "trainer.json").unlink()
    with pytest.raises(ValueError, match=r"last\.ckpt' holds no trainer\.json"):
        fit(tmp_path, 4, resume="last")


def test_another_run_of_the_same_trainer_is_another_run(tmp_path: Path) -> None:
    own = LastCheckpoint(tmp_path / "checkpoints")
    run = trainer(Local(), tmp_path, steps=3, enable_checkpointing=True, callbacks=[own])
    for steps in (3, 5):
        run.fit_loop.epoch_loop.max_steps = steps
        run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=20, num_val_rows=2))
    assert kept(tmp_path) == {"last.ckpt": 5, "last-v1.ckpt": 3}


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("by_path", [True, False])
def test_a_run_that_goes_on_replaces_its_own(by_path: bool, every: int, tmp_path: Path) -> None:
    fit(tmp_path, 3)
    path = tmp_path / "checkpoints" / "last.ckpt"
    fit(tmp_path, 5, resume=path if by_path else "last", every=every)
    assert kept(tmp_path) == {"last.ckpt": 5}


@pytest.mark.parametrize("copied", [True, False])
def test_a_run_that_goes_on_from_its_own_under_another_name_keeps_the_others(
    copied: bool, tmp_path: Path
) -> None:
    """Whose a checkpoint is does not show in its path, which is the same for all runs of a directory."""
    place = tmp_path / "checkpoints"
    fit(tmp_path, 3)
    if copied:
        shutil.copytree(place / "last.ckpt", place / "keep.ckpt")
    fit(tmp_path, 1)
    before = kept(tmp_path)
    assert before["last.ckpt"] == 1
    fit(tmp_path, 5, resume=place / ("keep.ckpt" if copied else "last-v1.ckpt"))
    assert kept(tmp_path) == before | {"last.ckpt": 5, "last-v2.ckpt": 1}
    fit(tmp_path, 2, resume=place / "last-v2.ckpt")
    assert kept(tmp_path) == before | {"last.ckpt": 2, "last-v2.ckpt": 1, "last-v3.ckpt": 5}


@pytest.mark.parametrize("every", [2, 3])
def test_a_run_that_goes_on_from_a_copy_of_its_last_replaces_that(every: int, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    fit(tmp_path, 3)
    shutil.copytree(place / "last.ckpt", place / "keep.ckpt")
    fit(tmp_path, 5, resume=place / "keep.ckpt", every=every)
    assert kept(tmp_path) == {"last.ckpt": 5, "keep.ckpt": 3}


def test_a_run_that_goes_back_to_an_older_checkpoint_of_one_keeps_its_last(tmp_path: Path) -> None:
    """Such as the one that was worth most."""
    each = ModelCheckpoint(tmp_path / "each", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    own = LastCheckpoint(tmp_path / "checkpoints", every_n_steps=2)
    run = trainer(Local(), tmp_path, steps=5, enable_checkpointing=True, callbacks=[each, own])
    run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=20, num_val_rows=2))
    fit(tmp_path, 3, resume=tmp_path / "each" / "step=2.ckpt")
    assert kept(tmp_path) == {"last.ckpt": 3, "last-v1.ckpt": 5}


def test_two_runs_from_one_checkpoint_are_two(tmp_path: Path) -> None:
    """A sweep over an option, which begins each run with the same models, in one directory."""
    fit(tmp_path / "base", 3)
    start = tmp_path / "base" / "checkpoints" / "last.ckpt"
    fit(tmp_path, 4, resume=start)
    fit(tmp_path, 5, resume=start)
    assert kept(tmp_path) == {"last.ckpt": 5, "last-v1.ckpt": 4}


@pytest.mark.parametrize("since", [True, False], ids=["present", "of a version that kept one identifier"])
def test_a_run_goes_on_from_all_before_it(since: bool, tmp_path: Path) -> None:
    """As from a checkpoint of Slurm's warning, which a resumed run wrote before a `last.ckpt` of its own."""
    place = tmp_path / "checkpoints"
    fit(tmp_path, 3)
    shutil.copytree(place / "last.ckpt", tmp_path / "first.ckpt")
    if since:
        fit(tmp_path, 4, resume="last")
    place.joinpath("last.ckpt").rename(place / "warned.ckpt")
    shutil.copytree(tmp_path / "first.ckpt", place / "last.ckpt")
    if not since:
        state = place / "warned.ckpt" / "trainer.json"
        text = state.read_text()
        state.write_text(re.sub(r',\s*"after": \[\]', "", text))
        assert state.read_text() != text
    fit(tmp_path, 5, resume=place / "warned.ckpt")
    assert kept(tmp_path) == {"last.ckpt": 5, "warned.ckpt": 4 if since else 3}


@pytest.mark.parametrize("damage", ["no identifier", "no JSON"])
def test_a_checkpoint_that_does_not_say_whose_it_is_is_kept(damage: str, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    fit(tmp_path, 3)
    shutil.copytree(place / "last.ckpt", place / "keep.ckpt")
    state = place / "last.ckpt" / "trainer.json"
    text = state.read_text()
    state.write_text(re.sub(r'"run": "\w+"', '"x": 0', text) if damage == "no identifier" else text[:-9])
    assert state.read_text() != text
    fit(tmp_path, 5, resume=place / "keep.ckpt")
    assert sorted(path.name for path in place.iterdir()) == ["keep.ckpt", "last-v1.ckpt", "last.ckpt"]


@pytest.mark.parametrize("every", [None, 2])
def test_a_second_run_with_the_same_callback_is_saved_at_its_end(every: int | None, tmp_path: Path) -> None:
    own = LastCheckpoint(tmp_path / "checkpoints", every_n_steps=every)
    for _ in range(2):
        run = trainer(Local(), tmp_path, steps=2, enable_checkpointing=True, callbacks=[own])
        run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=2))
    assert kept(tmp_path) == {"last.ckpt": 2, "last-v1.ckpt": 2}


def test_one_run_at_a_time(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    other = os.open(directory, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match=r"last\.ckpt: another run .* type another --trainer\.default_root"):
        fit(tmp_path, 1)
    os.close(other)
    fit(tmp_path, 1)
    fit(tmp_path, 1)
    assert kept(tmp_path) == {"last.ckpt": 1, "last-v1.ckpt": 1}


def test_a_process_that_was_forked_holds_no_lock(tmp_path: Path) -> None:
    forks = Forks()
    fit(tmp_path, 1, watch=forks)
    try:
        fit(tmp_path, 2, resume="last")
    finally:
        os.kill(forks.child, signal.SIGKILL)
        os.waitpid(forks.child, 0)
    assert kept(tmp_path) == {"last.ckpt": 2}


def test_a_run_is_the_only_one_though_it_has_forked(tmp_path: Path) -> None:
    own = LastCheckpoint(tmp_path)
    own._acquire()
    child = os.fork()
    if not child:
        os._exit(0 if own._lock is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(ValueError, match="another run that has not ended"):
        LastCheckpoint(tmp_path)._acquire()
    own._release()


def test_a_checkpoint_of_lightnings_own_that_could_not_be_written(tmp_path: Path) -> None:
    """From Python too, and before anything starts."""
    (tmp_path / "file").touch()
    keeper = ModelCheckpoint(dirpath=tmp_path / "file" / "x")
    run = trainer(Local(), tmp_path, steps=1, enable_checkpointing=True, callbacks=[keeper])
    with pytest.raises(
        ValueError, match=r"^ModelCheckpoint: .*file/x cannot be written \(Not a directory\)\."
    ):
        run.fit(grpo(), datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=2))
