"""Slurm's warning signal before a job ends: the checkpoint that it asks for waits for the iteration's end.

    iteration 7  [ generate ... signal ... update ]  -> checkpoint of 7 iterations, `scontrol requeue`
    validation after it         [ ... signal ... ]   -> the same
Nothing is saved in the middle of an iteration, whatever asks for it. The job that goes on removes the
checkpoints of warnings before the one that it begins with, since each job leaves one.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, cast

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

_LEFT = "left"
"""Key of the callback's state: paths of the checkpoints that warnings have left, the newest last."""


class Requeue(Callback):
    """Calls Lightning's handler of the signal, which saves and requeues the job, between two iterations.

    A checkpoint in the middle of an iteration would hold models after a part of its updates, and count all of
    its rows as read.
    """

    def __init__(self) -> None:
        self._handle: Callable[[], None] = lambda: None
        self._signalled = False
        self._left: list[str] = []

    @classmethod
    def add(cls, trainer: Trainer) -> None:
        """Add one to the trainer's callbacks, unless there is one."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, cls) for callback in callbacks):
            callbacks.append(cls())

    def state_dict(self) -> dict[str, Any]:
        """Where the run, and those that it goes on from, have left checkpoints; nothing without a warning."""
        return {_LEFT: [*self._left]} if self._left else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what the run before has left."""
        self._left = state_dict.get(_LEFT, [])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run, which has left nothing."""
        self._left = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's handler of the signal; Lightning removes this one too when the run ends."""
        environment = trainer._accelerator_connector.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or environment.requeue_signal is None:
            return
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._remove_older(trainer)
        warning = environment.requeue_signal
        if callable(handler := signal.getsignal(warning)):
            self._handle = lambda: handler(warning, None)
            signal.signal(warning, self._remember)

    def on_train_batch_end(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Call Lightning's handler if the signal has come."""
        self._heed(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same, so that a signal of this time does not wait for a whole further iteration."""
        if trainer.global_step:
            self._heed(trainer)

    def _heed(self, trainer: Trainer) -> None:
        if self._signalled:
            self._signalled = False
            self._handle()
            self._note(trainer._checkpoint_connector._hpc_resume_path)

    def _note(self, checkpoint: str | None) -> None:
        path = str(Path(checkpoint or "").absolute())
        if checkpoint and path not in self._left:
            self._left.append(path)

    def _remove_older(self, trainer: Trainer) -> None:
        """Remove what earlier jobs of the run have left, but for the newest; not that of other runs."""
        root = Path(trainer.default_root_dir).absolute()
        resumed = Path(trainer.ckpt_path or "").absolute()
        if resumed in root.glob("hpc_ckpt_*.ckpt"):
            self._note(str(resumed))
        here = [path for path in map(Path, self._left) if path.parent == root and path.is_dir()]
        for path in here[:-1]:
            trainer.strategy.remove_checkpoint(path)
        self._left = [str(path) for path in here[-1:]]

    def _remember(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True


def check_whole(path: object, state: Mapping[str, object]) -> None:
    """Refuse to save a checkpoint in the middle of an iteration.

    Args:
        path: of the checkpoint, for the message.
        state: what it would hold; Lightning's batch counts in it tell.

    Raises:
        RuntimeError: an iteration has begun and not ended.
    """
    loops = cast("Mapping[str, Mapping[str, Any]]", state.get("loops", {}))
    count = loops.get("fit_loop", {}).get("epoch_loop.batch_progress", {}).get("current", {})
    if count.get("ready", 0) > count.get("processed", 0):
        raise RuntimeError(
            f"{path}: this is the middle of an iteration: a part of its updates is done, and its rows count "
            "as read. Nothing was written. Save when it is over, in on_train_batch_end."
        )
