"""Slurm's warning before a job's end: heeded between two iterations, not within one.

    iteration 7  [ generate ... warning ... update ]  -> checkpoint of 7 iterations, `scontrol requeue`
Nothing is saved in the middle of one, whoever asks.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, cast

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class Requeue(Callback):
    """Lets the warning wait for the end of an iteration; Lightning saves, and has the job repeated.

    A checkpoint of half an iteration would be of models that some of its updates have changed, and its rows
    would count as read.
    """

    def __init__(self) -> None:
        self._heed: Callable[[], None] = lambda: None
        self._came = False

    @classmethod
    def add(cls, trainer: Trainer) -> None:
        """Have the trainer call one of them."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, cls) for callback in callbacks):
            callbacks.append(cls())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stand in for Lightning's handler, which takes this one away too when the run ends."""
        environment = trainer._accelerator_connector.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or environment.requeue_signal is None:
            return
        warning = environment.requeue_signal
        if callable(handler := signal.getsignal(warning)):
            self._heed = lambda: handler(warning, None)
            signal.signal(warning, self._note)

    def on_train_batch_end(self, *_: object, **__: object) -> None:
        """Do now what the warning asks for."""
        if self._came:
            self._came = False
            self._heed()

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True


def check_whole(path: object, state: Mapping[str, object]) -> None:
    """Refuse to save in the middle of an iteration.

    Args:
        path: of the checkpoint, for the message.
        state: that it would hold.

    Raises:
        RuntimeError: as said.
    """
    loops = cast("Mapping[str, Mapping[str, Any]]", state.get("loops", {}))
    count = loops.get("fit_loop", {}).get("epoch_loop.batch_progress", {}).get("current", {})
    if count.get("ready", 0) > count.get("processed", 0):
        raise RuntimeError(
            f"{path}: this is the middle of an iteration: a part of its updates is done, and its rows count "
            "as read. Nothing was written. Save when it is over, in on_train_batch_end."
        )
