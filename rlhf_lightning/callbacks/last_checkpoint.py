"""The newest state of a fit under one name, for `--ckpt_path last`.

    checkpoints/
        last.ckpt       of the run that goes on or was the last
        last-v1.ckpt    what a run before it has left under that name; `last-v2.ckpt` the one after that
One run at a time writes there.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from rlhf_lightning.callbacks.output import check_output, first_free, leaves_files
from rlhf_lightning.checkpoint import find_complete

logger = logging.getLogger(__name__)

_NAME = "last"


class LastCheckpoint(ModelCheckpoint):
    """Keep `last.ckpt`: written every few iterations and once more when training ends."""

    def __init__(self, directory: str | Path, *, every_n_steps: int = 10) -> None:
        """Say where and how often.

        Args:
            directory: of the checkpoint; one run at a time writes there.
            every_n_steps: iterations from one to the next.

        Raises:
            ValueError: they are none.
        """
        if every_n_steps < 1:
            raise ValueError(
                f"LastCheckpoint(every_n_steps={every_n_steps}): must be at least 1. For one at the end "
                "alone type a number above trainer.max_steps."
            )
        super().__init__(
            dirpath=directory,
            filename=_NAME,
            every_n_train_steps=every_n_steps,
            enable_version_counter=False,
        )
        self._every_n_steps = every_n_steps
        self._lock: int | None = None
        self._is_mine = False

    @property
    def path(self) -> Path:
        """Of the checkpoint."""
        return Path(str(self.dirpath)) / f"{_NAME}{self.FILE_EXTENSION}"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a directory in which another run keeps its own, or that cannot be written.

        Raises:
            ValueError: the directory is another run's, or cannot be written.
        """
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and leaves_files(trainer):
            check_output(trainer, self.path.parent, name="LastCheckpoint")
            if self.path.parent.is_dir():
                self._take()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the directory, and see whether the run goes on from what is there."""
        super().on_train_start(trainer, pl_module)
        resumed = os.path.realpath(trainer.ckpt_path) if trainer.ckpt_path else ""
        own = {str(self.path), str(find_complete(self.path))}
        self._is_mine = bool(resumed) and not own.isdisjoint((resumed, self.best_model_path))
        if leaves_files(trainer):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._take()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what a validation after the iteration of the checkpoint has changed, such as an early stop."""
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn == "fit" and self._last_global_step_saved == trainer.global_step > 0:
            self._save_checkpoint(trainer, str(self.path))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what the iterations after the last checkpoint have learned, and what other callbacks count."""
        super().on_train_end(trainer, pl_module)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        counting = trainer.global_step and any(c.state_dict() for c in callbacks if c is not self)
        if leaves_files(trainer) and (counting or trainer.global_step % self._every_n_steps):
            self._save_checkpoint(trainer, str(self.path))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the directory to others."""
        super().on_exception(trainer, pl_module, exception)
        self._leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the directory to others."""
        super().teardown(trainer, pl_module, stage)
        self._leave()

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """See `ModelCheckpoint`; what Slurm's warning has left too: Lightning goes on from the newest."""
        warned = trainer._checkpoint_connector._hpc_resume_path
        return super()._find_last_checkpoints(trainer) | ({warned} if warned else set())

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        others = self.path if self.path.exists() else find_complete(self.path)
        if others is not None and not self._is_mine:
            kept = first_free(self.path.with_suffix(""), self.FILE_EXTENSION)
            others.rename(kept)
            logger.warning("%s is of another run; it is %s now.", others, kept.name)
        self._is_mine = True
        self.best_model_path = filepath  # by which a run that goes on from another file knows its own
        super()._save_checkpoint(trainer, filepath)

    def _take(self) -> None:
        """Lock the directory until the run ends, however it ends; nothing on a disk that knows no locks."""
        if self._lock is not None:
            return
        self._lock = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._leave()
            raise ValueError(
                f"{self.path}: another run that has not ended writes it. Type another "
                "--trainer.default_root_dir."
            ) from None
        except OSError as err:
            logger.debug("%s: is on a disk without locks (%s)", self.path, err)

    def _leave(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
