"""LastCheckpoint: when it is written, and what a validation at that iteration has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from rlhf_lightning import checkpoint as files
from rlhf_lightning.algos import GRPO
from rlhf_lightning.callbacks import LastCheckpoint, last_checkpoint
from rlhf_lightning.data import TaskData
from rlhf_lightning.strategies import Local
from tests.ranks.test_last_checkpoint import Watch, fit, kept
from tests.unit.algos.short import grpo, trainer


@pytest.mark.parametrize("after", [4, 5])
def test_a_validation_at_the_iteration_of_a_checkpoint_is_in_it(after: int, tmp_path: Path) -> None:
    whole, failing, resumed = Watch(), Watch(fails_at=after), Watch()
    fit(tmp_path / "whole", 6, watch=whole)
    with pytest.raises(KeyError, match="it fails"):
        fit(tmp_path / "part", 6, watch=failing)
    assert kept(tmp_path / "part") == {"last.ckpt": 4}
    fit(tmp_path / "part", 6, resume="last", watch=resumed)
    assert resumed.rows == whole.rows[4:]
    assert resumed.counted == whole.counted == 3


class Forgetful(Watch):
    """A callback without state."""

    def state_dict(self) -> dict[str, int]:
        return {}


class Clock(Callback):
    """A clock by which each iteration takes a second, and each checkpoint its own time; notes those."""

    def __init__(self, *, save_s: float, patch: pytest.MonkeyPatch) -> None:
        self.now_s, self.save_s = 1000.0, save_s
        self.saved: list[object] = []
        self.write = files.write_state
        patch.setattr(last_checkpoint, "monotonic", lambda: self.now_s)
        patch.setattr(files, "write_state", self.save)

    def on_train_batch_start(self, *_: object) -> None:
        self.now_s += 1

    def save(self, directory: Path, state: dict[str, object]) -> None:
        self.now_s += self.save_s
        self.saved.append(state["global_step"])
        self.write(directory, state)


@pytest.mark.parametrize(
    ("watch", "saved"), [(Watch(), [2, 2, 4, 4, 4]), (Forgetful(), [2, 4])], ids=["state", "no state"]
)
def test_a_validation_is_saved_where_it_may_have_changed_something(
    watch: Watch, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(save_s=0, patch=monkeypatch)
    fit(tmp_path, 4, watch=watch)
    assert (clock.saved, watch.counted) == (saved, 2)


class Counting(GRPO):
    """Has a tensor, which its validation changes, and which is NaN before."""

    counts: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.register_buffer("counted", torch.full((), torch.nan))

    def on_validation_epoch_end(self) -> None:
        if self.counts:
            self.get_buffer("counted").fill_(self.global_step)


class Still(Counting):
    """Has a tensor that stays as it is."""

    counts: bool = False


class Growing(Still):
    """Has another tensor after each validation, and after the second one the first no more."""

    def on_validation_epoch_end(self) -> None:
        self.register_buffer(f"at_{self.global_step}", torch.zeros(()))
        if self.global_step == 4:
            del self.counted


class Adding(Forgetful):
    """Adds to checkpoints by a function on the object itself, as Lightning's LambdaCallback does."""

    def __init__(self) -> None:
        super().__init__()
        self.on_save_checkpoint = self.add  # type: ignore[method-assign]

    def add(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        checkpoint["noted"] = self.counted


def test_what_an_objects_own_function_adds_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(save_s=0, patch=monkeypatch)
    fit(tmp_path, 4, watch=Adding(), kind=Still)
    assert clock.saved == [2, 2, 4, 4, 4]
    assert files.read_state(tmp_path / "checkpoints" / "last.ckpt")["noted"] == 2


class Noting(GRPO):
    """Keeps a number in checkpoints, which its validation changes."""

    noted = 0

    def on_validation_epoch_end(self) -> None:
        self.noted = self.global_step

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        checkpoint["noted"] = self.noted


@pytest.mark.parametrize(
    ("kind", "saved"),
    [(Counting, [2, 2, 4, 4]), (Noting, [2, 2, 4, 4, 4]), (Still, [2, 4]), (Growing, [2, 2, 4, 4])],
)
def test_what_a_validation_changes_in_the_algorithm_is_in_the_last_checkpoint(
    kind: type[GRPO], saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, watch = Clock(save_s=0, patch=monkeypatch), Forgetful()
    fit(tmp_path, 4, watch=watch, kind=kind)
    assert (clock.saved, watch.counted) == (saved, 2)
    state = files.read_state(tmp_path / "checkpoints" / "last.ckpt")
    held = state["state_dict"]
    assert isinstance(held, dict)
    if kind is Counting:
        assert held["counted"] == 4
    if kind is Noting:
        assert state["noted"] == 4


class Rows(TaskData):
    """Keeps how many validations there were."""

    validated = 0

    def state_dict(self) -> dict[str, int]:
        return {"validated": self.validated}


def test_the_state_of_the_data_after_a_validation_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(save_s=0, patch=monkeypatch)
    fit(tmp_path, 2, watch=Forgetful(), data=Rows)
    assert clock.saved == [2, 2, 2]


@pytest.mark.parametrize(
    ("save_s", "every", "saved"),
    [
        (0.05, None, [2, 4, 6, 8]),
        (0.15, None, [2, 6, 8]),
        (0.4, None, [2, 8]),
        (0.4, 2, [2, 4, 6, 8]),
        (0.4, 3, [3, 6, 8]),
    ],
)
def test_saving_takes_a_twentieth_of_the_time_unless_a_number_is_given(
    save_s: float, every: int | None, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of 2 iterations in place of 10; the last one is saved, too, where its multiple comes too early."""
    monkeypatch.setattr(last_checkpoint, "USUAL_STEPS", 2)
    clock, own = Clock(save_s=save_s, patch=monkeypatch), LastCheckpoint(tmp_path, every_n_steps=every)
    for _ in range(2):  # the second run does not wait for what saving took in the first
        run = trainer(Local(), tmp_path, steps=8, enable_checkpointing=True, callbacks=[clock, own])
        run.fit(grpo(), datamodule=TaskData(batch_size=1, num_rows=8, num_val_rows=0))
    assert clock.saved == saved * 2


def test_what_a_validation_writes_again_is_of_that_twentieth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_checkpoint, "USUAL_STEPS", 2)
    clock = Clock(save_s=0.14, patch=monkeypatch)
    run = trainer(
        Local(),
        tmp_path,
        steps=9,
        enable_checkpointing=True,
        limit_val_batches=1,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        callbacks=[clock, Watch(), LastCheckpoint(tmp_path)],
    )
    run.fit(grpo(), datamodule=TaskData(batch_size=1, num_rows=10, num_val_rows=2))
    assert clock.saved == [2, 2, 8, 8, 9]
