"""`rlhf fit --trace out.json`: every call of every device, for Perfetto."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.callbacks.timeline import write_trace
from rlhf_lightning.controller import CallReport
from rlhf_lightning.output import check_output, leaves_files
from rlhf_lightning.trainer_checks import check_lightning
from rlhf_lightning.trainer_habits import begins_anew

logger = logging.getLogger(__name__)


class Trace(Callback):
    """Record which device ran what and when, and write it when the run ends, also with an error."""

    def __init__(self, path: str = "trace.json") -> None:
        """Say where the file goes.

        Args:
            path: of a JSON file in the Trace Event Format.
        """
        super().__init__()
        self.path = Path(path)
        self.calls: list[CallReport] = []
        """Reports of the calls of all iterations, and of validations between them; the strategy adds them."""
        self.iterations: list[tuple[float, float]] = []
        """Of each iteration, the Unix time of its start, and its seconds."""
        self._began_s = self._clock_s = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin anew, unless the trainer goes on; ask for the reports, and refuse what cannot be written.

        Raises:
            ValueError: the path is a directory, or nothing can be written there; or the trainer's strategy is
                one of Lightning's, which makes no reports.
        """
        if self.path.is_dir():
            raise ValueError(f"Trace: {self.path} is a directory. Type a file in it: {self.path}/trace.json.")
        check_output(trainer, self.path.parent, name="Trace")
        if begins_anew(trainer, stage):
            self.calls, self.iterations = [], []
        if isinstance(pl_module, RLHFAlgorithm):
            check_lightning(pl_module)
            strategy = pl_module.strategy
            strategy.history = self.calls = self.calls if strategy.history is None else strategy.history

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        """Take the time."""
        self._began_s, self._clock_s = time.time(), time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        """Record an iteration; the time may have been set meanwhile."""
        self.iterations.append((self._began_s, time.perf_counter() - self._clock_s))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file if the run is a validation."""
        if trainer.state.fn == "validate":
            self.on_predict_end(trainer, pl_module)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the last calls, which the strategy only does after this, and write the file."""
        assert isinstance(pl_module, RLHFAlgorithm)
        pl_module.strategy.drain()
        self._write(trainer)

    on_test_end = on_predict_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write what was recorded; an error of that would take the place of the one that ended the run."""
        try:
            self._write(trainer)
        except OSError as err:
            logger.warning("%s: could not be written (%s).", self.path, err.strerror)

    def _write(self, trainer: Trainer) -> None:
        if self.calls and leaves_files(trainer):
            write_trace(self.path, self.calls, self.iterations)
