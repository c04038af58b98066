"""The last line of `make demo`: whether the reward rose, and how long it took."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from rlhf_lightning.trainer_habits import begins_anew

_METRIC = "reward/mean"
_STEPS = 5
"""Steps that the first and the last mean cover."""


class DemoSummary(Callback):
    """Write `demo: reward_first5=<x> reward_last5=<y> seconds=<s>` as the last line of a fit that ended well.

    The rewards are means over the first and the last steps (also across a resume), the seconds run from
    `setup` of this fit to its end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: list[float] = []
        self._last: list[float] = []
        self._start_s = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin anew, unless the trainer goes on; move behind progress bars, whose `teardown` writes too."""
        self._start_s = time.perf_counter()
        if begins_anew(trainer, stage):
            self._first, self._last = [], []
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = [x for x in callbacks if x is not self and not isinstance(x, Checkpoint)]
        savers = [x for x in callbacks if isinstance(x, Checkpoint)]  # stay last: they save this one's state
        trainer.callbacks = [*others, self, *savers]  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Note the reward of a step."""
        if _METRIC in trainer.callback_metrics:
            reward = float(trainer.callback_metrics[_METRIC])
            self._first = [*self._first, reward][:_STEPS]
            self._last = [*self._last, reward][-_STEPS:]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the line; Lightning does not come here after an error."""
        if stage == "fit" and trainer.is_global_zero:
            seconds = time.perf_counter() - self._start_s
            sys.stdout.write(
                f"demo: reward_first{_STEPS}={_mean(self._first):.4f} "
                f"reward_last{_STEPS}={_mean(self._last):.4f} seconds={seconds:.1f}\n"
            )
            sys.stdout.flush()

    def state_dict(self) -> dict[str, list[float]]:
        """Hand the rewards to a checkpoint."""
        return {"first": self._first, "last": self._last}

    def load_state_dict(self, state_dict: Mapping[str, Sequence[float]]) -> None:
        """Continue from the rewards of a checkpoint."""
        self._first, self._last = list(state_dict["first"]), list(state_dict["last"])


def _mean(values: list[float]) -> float:
    return fmean(values) if values else math.nan
