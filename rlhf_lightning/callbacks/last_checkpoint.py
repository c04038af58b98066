"""The newest checkpoint of a run under a fixed name, for `--ckpt_path last`.

    checkpoints/
        last.ckpt       of the present or the latest run
        last-v1.ckpt    of the first earlier run, renamed when another one began; last-v2.ckpt of the second
One run at a time writes to the directory: it holds a lock on it. Whose `last.ckpt` is, its own state says:
every run draws an identifier, and keeps those of the runs that it goes on from. So two runs that both began
with one checkpoint are not taken for each other.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from rlhf_lightning.checkpoint import find_complete, read_state
from rlhf_lightning.output import first_free, leaves_files

logger = logging.getLogger(__name__)

USUAL_STEPS = 10
"""Iterations from one checkpoint to the next where none are given, and saving is quick."""
MOST_OF_TIME = 0.05
"""Largest part of the time that saving takes where none are given."""
_NAME = "last"
_RUN = "run"
"""Key of the callback's state: the identifier of the run."""
_AFTER = "after"
"""Key of the callback's state: identifiers of the runs that it goes on from, the first one first."""
_LOCKED = set["LastCheckpoint"]()
"""Those of this process that hold the lock of a directory."""


class LastCheckpoint(ModelCheckpoint):
    """Keep `last.ckpt`: written every few iterations and once more when training ends.

    Training waits for it. So by default it waits, from a multiple of 10 iterations to another, until 20 times
    the seconds have passed that the last one took.
    """

    _saved_at = 0.0
    """When the last one was there, by the clock of `monotonic`."""
    _took_s = 0.0
    """Seconds that it took."""

    def __init__(self, directory: str | Path, *, every_n_steps: int | None = None) -> None:
        """Say where and how often.

        Args:
            directory: of the checkpoint; one run at a time writes there.
            every_n_steps: iterations from one to the next; None: 10, or more where saving takes long.

        Raises:
            ValueError: `every_n_steps` is below 1.
        """
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(
                f"LastCheckpoint(every_n_steps={every_n_steps}): must be at least 1. For one at the end "
                "alone type a number above trainer.max_steps."
            )
        super().__init__(
            dirpath=directory,
            filename=_NAME,
            every_n_train_steps=every_n_steps or USUAL_STEPS,
            enable_version_counter=False,
        )
        self._is_exact = every_n_steps is not None
        self._lock: int | None = None
        self._run, self._after = "", list[str]()

    @property
    def path(self) -> Path:
        """Path of the checkpoint."""
        return Path(str(self.dirpath)) / f"{_NAME}{self.FILE_EXTENSION}"

    def state_dict(self) -> dict[str, Any]:
        """The state of ModelCheckpoint, and the identifiers of the run and of those that it goes on from."""
        return super().state_dict() | {_RUN: self._run, _AFTER: self._after}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Leave unread what ModelCheckpoint says of other checkpoints."""

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on from the run that wrote it, which may have saved after another number of iterations."""
        for state in _states(checkpoint):
            self._after = [*state.get(_AFTER, []), state[_RUN]]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run, and refuse a directory that another one is using.

        Raises:
            ValueError: the directory is another run's.
        """
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._run, self._after = uuid4().hex, []
        self._last_global_step_saved, self._took_s = 0, 0.0
        self._held = dict[str, torch.Tensor]()
        if leaves_files(trainer) and self.path.parent.is_dir():
            self._acquire()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lock the directory, and rename the checkpoint in it, unless the run continues that."""
        super().on_train_start(trainer, pl_module)
        resumed = os.path.realpath(trainer.ckpt_path) if trainer.ckpt_path else ""
        found, slurm = find_complete(self.path), trainer._checkpoint_connector._hpc_resume_path
        again = self._after[-1:] if slurm and resumed == os.path.realpath(slurm) else []
        is_mine = resumed in (str(self.path), str(found))
        is_mine = is_mine or _is_of(found, self._after, again, step=trainer.global_step)
        if not leaves_files(trainer):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._acquire()
        found = self.path if self.path.exists() else found
        if found is not None and not is_mine:
            kept = first_free(self.path.with_suffix(""), self.FILE_EXTENSION)
            found.rename(kept)
            logger.warning("%s: this run does not go on from it; it is %s now.", found, kept.name)

    def on_train_batch_end(self, trainer: Trainer, *others: Any) -> None:  # noqa: ANN401 - passed on
        """Save after every few iterations; where their number was not given, no sooner than it pays."""
        if self._is_exact or monotonic() - self._saved_at >= self._took_s / MOST_OF_TIME:
            super().on_train_batch_end(trainer, *others)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save again if the iteration was saved before its validation, which may have changed something."""
        super().on_validation_end(trainer, pl_module)
        is_saved = trainer.state.fn == "fit" and self._last_global_step_saved == trainer.global_step > 0
        if is_saved and self._may_have_changed(trainer):
            before = self._took_s
            self._save_checkpoint(trainer, str(self.path))
            self._took_s += before

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the iterations since the last checkpoint, and the final state of what else it holds."""
        super().on_train_end(trainer, pl_module)
        is_new = self._last_global_step_saved != trainer.global_step
        if leaves_files(trainer) and trainer.global_step and (is_new or self._may_have_changed(trainer)):
            self._save_checkpoint(trainer, str(self.path))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Unlock the directory."""
        super().on_exception(trainer, pl_module, exception)
        self._release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unlock the directory."""
        super().teardown(trainer, pl_module, stage)
        self._release()

    def _may_have_changed(self, trainer: Trainer) -> bool:
        """Whether a checkpoint of now may hold other state of callbacks, algorithm or data than the last."""
        module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
        callbacks = [one for one in trainer.callbacks if one is not self]  # type: ignore[attr-defined]
        if any(one.state_dict() for one in (*callbacks, data) if one is not None):
            return True
        own, held = module.state_dict(), self._held
        same = own.keys() == held.keys() and all(_are_equal(x, held[name]) for name, x in own.items())
        return not same or any(map(_adds_own, [module, *callbacks]))

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Candidates for `ckpt_path="last"`, without earlier runs': its own, and that of Slurm's warning."""
        slurm, own = trainer._checkpoint_connector._hpc_resume_path, find_complete(self.path) or self.path
        return ({str(own)} if own.exists() else set()) | ({slurm} if slurm else set())

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self.best_model_path = filepath  # which a trainer takes for ckpt_path="best"
        began = monotonic()
        super()._save_checkpoint(trainer, filepath)
        self._saved_at = monotonic()
        self._took_s = self._saved_at - began
        self._held = {name: x.clone() for name, x in trainer.lightning_module.state_dict().items()}

    def _acquire(self) -> None:
        """Lock the directory until the run ends, in whatever way; does nothing on a disk without locks."""
        if self._lock is not None:
            return
        self._lock = os.open(self.path.parent, os.O_RDONLY)
        _LOCKED.add(self)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            raise ValueError(
                f"{self.path}: another run that has not ended writes there. Wait for its end, or "
                "type another --trainer.default_root_dir."
            ) from None
        except OSError as err:
            logger.debug("%s: is on a disk without locks (%s)", self.path, err)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _LOCKED.discard(self)


def _unlock() -> None:
    """Leave locks to the parent of a forked process: a loader's worker outlives a run that is killed."""
    for callback in list(_LOCKED):
        callback._release()


os.register_at_fork(after_in_child=_unlock)


def searched(directory: Path) -> str:
    """What is in a directory that has no last checkpoint, in words."""
    if not directory.is_dir():
        return f"{directory} is not there"
    beside = sorted(path.name for path in directory.glob("*.ckpt"))
    return f"{directory} holds " + (f"no last.ckpt, but {', '.join(beside)}" if beside else "no checkpoint")


def _adds_own(part: LightningModule | Callback) -> bool:
    """Whether what a module or a callback adds to a checkpoint is of the user's own, so may be anything."""
    package, *_ = part.on_save_checkpoint.__module__.split(".")
    return package not in {"lightning", "rlhf_lightning"}


def _are_equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    alike = (x.shape, x.dtype) == (y.shape, y.dtype)
    return alike and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


def _is_of(checkpoint: Path | None, runs: list[str], again: list[str], *, step: int) -> bool:
    """Whether one of these runs wrote a checkpoint; not, where that cannot be read, or has no identifier.

    Args:
        checkpoint: which may be one.
        runs: identifiers.
        again: of them, that from whose checkpoint Slurm begins once more; a job between, which failed, may
            have gone on from it, too.
        step: the iteration that is gone on from; a checkpoint of a later one is kept, except from Slurm.
    """
    if checkpoint is None:
        return False
    try:
        found = read_state(checkpoint)
    except ValueError:
        return False
    held, ended = _states(found), found.get("global_step")
    is_later = isinstance(ended, int) and ended > step
    own = again if is_later else runs
    return any(state[_RUN] in own or set(again) & set(state.get(_AFTER, [])) for state in held)


def _states(checkpoint: Mapping[str, object]) -> list[dict[str, Any]]:
    """What callbacks of this class have put into a checkpoint."""
    callbacks = checkpoint.get("callbacks")
    states = callbacks.values() if isinstance(callbacks, dict) else ()
    return [state for state in states if isinstance(state, dict) and state.get(_RUN)]
