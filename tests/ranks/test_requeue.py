"""Checkpoints are of whole iterations, also where Slurm warns in the middle of one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.algos import GRPO
from rlhf_lightning.callbacks import LastCheckpoint, ValidateFirst
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.requeue import Requeue
from rlhf_lightning.strategies import Local
from tests.unit.algos.short import grpo, trainer

JOB = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "rlhf"}


class Noted(GRPO):
    """Keeps the rows of its iterations; in the second one something happens."""

    when = 2

    def on_fit_start(self) -> None:
        self.rows: list[list[int]] = []

    def step(self, batch: Batch) -> Metrics:
        self.rows.append(batch["row_ids"].tolist())
        metrics = super().step(batch)
        if len(self.rows) == self.when:
            self.happen()
        return metrics

    def happen(self) -> None:
        """Nothing."""


class Warned(Noted):
    """Slurm warns."""

    def happen(self) -> None:
        """As `sbatch --signal=USR1@90` does."""
        os.kill(os.getpid(), signal.SIGUSR1)


class WarnedAtOnce(Warned):
    """In the first one."""

    when = 1


class Ended(Warned):
    """And ends the job in the iteration after that."""

    def step(self, batch: Batch) -> Metrics:
        """As GRPO does, twice."""
        if len(self.rows) == 2:
            raise KeyError("the time is over")
        return super().step(batch)


class Validated(Noted):
    """Keeps after how many iterations it was validated."""

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.after: list[int] = []

    def on_validation_start(self) -> None:
        self.after.append(self.trainer.global_step)


class WarnedLater(Validated):
    """Slurm warns in the validation after so many iterations."""

    at = 2

    def on_validation_start(self) -> None:
        """As `sbatch --signal=USR1@90` does."""
        super().on_validation_start()
        if self.after[-1] == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)


class Removing(Warned):
    """Somebody removes the checkpoint of the first warning before the next one, which takes its name."""

    def happen(self) -> None:
        """As `Warned` does, after that."""
        shutil.rmtree(Path(self.trainer.default_root_dir) / "hpc_ckpt_1.ckpt")
        super().happen()


class Impatient(Noted):
    """Saves itself."""

    def happen(self) -> None:
        """In the middle of the iteration."""
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "mine.ckpt")


def fit(
    kind: type[Noted],
    root: Path,
    *,
    steps: int = 3,
    last: LastCheckpoint | None = None,
    resume: str = "",
    fast_dev_run: int = 0,
) -> Noted:
    algorithm = grpo(kind)
    assert isinstance(algorithm, kind)
    data = TaskData(batch_size=2, num_rows=8, num_val_rows=2 * issubclass(kind, Validated))
    kept: dict[str, Any] = {"fast_dev_run": fast_dev_run}
    kept |= {"callbacks": [last], "enable_checkpointing": True} if last else {}
    if data.num_val_rows:
        kept |= {"limit_val_batches": 1, "val_check_interval": 2, "callbacks": [ValidateFirst()]}
    trainer(Local(), root, steps=steps, **kept).fit(algorithm, datamodule=data, ckpt_path=resume or None)
    return algorithm


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a job of Slurm, which the test now is, has asked `scontrol` for."""
    command, asked = tmp_path / "scontrol", tmp_path / "asked"
    command.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    command.chmod(0o755)
    for name, value in {"PATH": f"{tmp_path}:{os.environ['PATH']}", **JOB}.items():
        monkeypatch.setenv(name, value)
    return asked


def saved(checkpoint: Path) -> object:
    """The iterations before it."""
    return json.loads((checkpoint / "trainer.json").read_text())["state"]["global_step"]


def test_slurms_warning_waits_for_the_end_of_the_iteration(tmp_path: Path, asked: Path) -> None:
    root, before = tmp_path / "run", signal.getsignal(signal.SIGUSR1)
    uninterrupted = fit(Noted, tmp_path / "other", steps=4)
    fit(Warned, root)
    assert signal.getsignal(signal.SIGUSR1) is before
    assert asked.read_text() == "requeue 77\n"
    assert saved(root / "hpc_ckpt_1.ckpt") == 2
    repeated = fit(Noted, root, steps=4)  # Lightning finds that checkpoint by itself
    assert repeated.rows == uninterrupted.rows[2:]


@pytest.mark.parametrize("at", [0, 2, 4], ids=["before the first", "within an epoch", "at its end"])
def test_slurms_warning_waits_for_the_end_of_a_validation_alone(
    at: int, tmp_path: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    monkeypatch.setattr(WarnedLater, "at", at)
    uninterrupted = fit(Validated, tmp_path / "other", steps=6)
    assert isinstance(uninterrupted, Validated)
    assert uninterrupted.after == [0, 2, 4, 6]
    fit(WarnedLater, root, steps=5)
    assert asked.read_text() == "requeue 77\n"
    done = at or 1  # before the first iteration it waits for that, so that none is validated first twice
    assert saved(root / "hpc_ckpt_1.ckpt") == done
    repeated = fit(Validated, root, steps=6)
    assert isinstance(repeated, Validated)
    assert (repeated.rows, repeated.after) == (uninterrupted.rows[done:], [*range(at + 2, 7, 2)])


def test_a_trainer_that_fits_again_heeds_each_warning_once(tmp_path: Path) -> None:
    again = trainer(Local(), tmp_path)
    for _ in range(2):
        Requeue.add(again)
    assert len([callback for callback in again.callbacks if isinstance(callback, Requeue)]) == 1  # type: ignore[attr-defined]


def test_a_warning_that_the_job_ignores_is_left_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert len(fit(Warned, tmp_path).rows) == 3
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("asked")
def test_last_is_what_the_warning_has_left_where_that_is_newer(tmp_path: Path) -> None:
    """As in the script of docs/cluster.md; of itself Lightning looks at `last.ckpt` alone."""
    root = tmp_path / "run"
    uninterrupted = fit(Noted, tmp_path / "other", steps=5)

    def go_on(kind: type[Noted], *, steps: int) -> list[list[int]]:
        last = LastCheckpoint(root / "checkpoints")
        return fit(kind, root, steps=steps, last=last, resume="last" if root.exists() else "").rows

    go_on(Noted, steps=1)
    with pytest.raises(KeyError, match="the time is over"):
        go_on(Ended, steps=5)
    assert (root / "hpc_ckpt_1.ckpt").is_dir()
    assert go_on(Noted, steps=4) == uninterrupted.rows[3:4]
    assert go_on(Noted, steps=5) == uninterrupted.rows[4:]  # `last.ckpt` is the newer one again
    assert [path.name for path in (root / "checkpoints").iterdir()] == ["last.ckpt"]


@pytest.mark.usefixtures("asked")
def test_jobs_that_begin_with_one_warning_replace_the_last_of_each_other(tmp_path: Path) -> None:
    """As without `ckpt_path="last"` after a node has failed: Lightning takes what the warning has left."""
    place = tmp_path / "checkpoints"
    for kind, steps in ((Warned, 3), (Noted, 4), (Noted, 5), (Noted, 6)):
        fit(kind, tmp_path, steps=steps, last=LastCheckpoint(place))
        assert [path.name for path in place.iterdir()] == ["last.ckpt"]


def left(root: Path) -> list[str]:
    """What warnings have left."""
    return sorted(path.name for path in root.glob("hpc_ckpt_*.ckpt"))


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("keeps_last", [False, True])
def test_a_job_removes_what_warnings_before_the_newest_have_left(keeps_last: bool, tmp_path: Path) -> None:
    """Also where it goes on from `last.ckpt`, since Slurm did not repeat the job that was warned."""
    root = tmp_path / "run"

    def go_on(kind: type[Noted], *, steps: int) -> list[str]:
        last = LastCheckpoint(root / "checkpoints") if keeps_last else None
        fit(kind, root, steps=steps, last=last, resume="last" if last and root.exists() else "")
        return left(root)

    assert go_on(Warned, steps=3) == ["hpc_ckpt_1.ckpt"]
    assert go_on(Warned, steps=6) == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"]
    assert go_on(Warned, steps=9) == ["hpc_ckpt_2.ckpt", "hpc_ckpt_3.ckpt"]
    assert go_on(Noted, steps=10) == ["hpc_ckpt_3.ckpt"]


@pytest.mark.usefixtures("asked")
def test_what_warnings_of_other_runs_have_left_stays(tmp_path: Path) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    for directory in (root, other):
        fit(Warned, directory)
    fit(Warned, other, steps=5)
    fit(Warned, root, steps=7, resume=str(other / "hpc_ckpt_2.ckpt"))
    fit(Noted, root, steps=8)
    assert left(root) == left(other) == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"]


@pytest.mark.usefixtures("asked")
def test_a_run_to_look_whether_it_runs_removes_nothing(tmp_path: Path) -> None:
    for steps in (1, 2):
        fit(WarnedAtOnce, tmp_path, steps=steps)
    looked = fit(Noted, tmp_path, fast_dev_run=5)
    assert len(looked.rows) == 2, "it goes on from the newer"
    assert left(tmp_path) == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"]


@pytest.mark.usefixtures("asked")
def test_what_is_the_newest_that_is_there_stays(tmp_path: Path) -> None:
    """Though somebody has removed a newer one, or the one whose name it has."""
    root, place = tmp_path / "run", tmp_path / "run" / "checkpoints"
    for kind, steps in ((Warned, 3), (Removing, 6), (Noted, 7)):
        fit(kind, root, steps=steps)
        assert left(root) == ["hpc_ckpt_1.ckpt"]
    fit(Warned, root, steps=9, last=LastCheckpoint(place))
    shutil.rmtree(root / "hpc_ckpt_2.ckpt")
    fit(Noted, root, steps=10, last=LastCheckpoint(place), resume="last")
    assert left(root) == ["hpc_ckpt_1.ckpt"]


def test_nothing_is_saved_in_the_middle_of_an_iteration(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"mine\.ckpt: this is the middle of an iteration.*on_train_batch_end"
    ):
        fit(Impatient, tmp_path)
    assert list(tmp_path.iterdir()) == []
