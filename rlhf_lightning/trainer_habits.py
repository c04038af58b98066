"""Where Lightning's trainer does otherwise here: what it says, when it monitors, which metrics it keeps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ModelSummary, RichModelSummary
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric


def silence_lightning(trainer: Trainer, model: LightningModule) -> None:
    """Silence two messages of Lightning's that are wrong where the models live on other devices.

    They are the summary of a module without parameters, and the warning that a checkpoint saved under manual
    optimization already holds the weights after the last step.
    """
    warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization")
    if next(model.parameters(), None) is None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        usual = [
            type(c) in (ModelSummary, RichModelSummary) and vars(c) == vars(type(c)()) for c in callbacks
        ]
        callbacks[:] = [callback for callback, left in zip(callbacks, usual, strict=True) if not left]


def validation_interval(trainer: Trainer) -> int | float | None:
    """Iterations from one validation to the next, or parts of an epoch; None where it is a time.

    A trainer that was given a time lacks the attribute that Lightning declares.
    """
    return getattr(trainer, "val_check_interval", None)


def monitor_each_validation(trainer: Trainer) -> None:
    """Let EarlyStopping and ModelCheckpoint check their metric after every validation.

    With `val_check_interval=1` a validation follows every iteration, but Lightning takes the 1 for 1.0, a
    whole epoch, and would let them check at the end of an epoch only. With a time, such as "00:00:30:00",
    ModelCheckpoint does so by itself, and EarlyStopping would look for the interval, which is not there.
    """
    interval = validation_interval(trainer)
    if interval is not None and (type(interval) is not int or interval != 1):
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping) and callback._check_on_train_epoch_end is None:
            callback._check_on_train_epoch_end = False
        if isinstance(callback, ModelCheckpoint) and callback._save_on_train_epoch_end is None:
            callback._save_on_train_epoch_end = False


def begins_anew(trainer: Trainer, stage: str) -> bool:
    """Whether a callback drops in `setup` what it kept of an earlier run; a checkpoint's is read later.

    A trainer that has iterated and goes on keeps it.
    """
    return stage == "fit" and not trainer.global_step


def reset_step_metrics(trainer: Trainer) -> None:
    """Drop the previous iteration's step metrics, so that they are not logged once more.

    Lightning repeats the last value of a metric in every step that does not report it: an iteration that
    learns nothing would seem to have the loss of the one before.
    """
    for number in _step_metrics(trainer):
        number.reset()


def unreported(trainer: Trainer) -> set[str]:
    """Return the step metrics that this iteration did not report.

    The trainer's `callback_metrics` keep their last value, for EarlyStopping and ModelCheckpoint to find.
    """
    return {number.meta.name for number in _step_metrics(trainer) if number.has_reset}


def check_logged(trainer: Trainer, returned: Mapping[str, float], measured: Mapping[str, float]) -> None:
    """Refuse names under which an iteration has two metrics, one of which would be lost.

    Args:
        trainer: it holds what the step has logged by itself.
        returned: metrics that the step returned.
        measured: metrics that the run takes of every iteration.
    """
    if twice := sorted({*returned} & {*measured}):
        raise ValueError(
            f"step returned the metric {twice[0]!r}, which the run measures: {_renamed(twice[0])}"
        )
    own = {one.meta.name for one in _results(trainer) if one.meta.fx == "training_step" and not one.has_reset}
    if twice := sorted(own & {*returned, *measured}):
        raise ValueError(
            f"self.log({twice[0]!r}, ...): the iteration reports a metric of this name too, which `step` "
            f"returns or the run measures. {_renamed(twice[0])}"
        )


def _renamed(name: str) -> str:
    return f"Log yours by another name, such as {'mine/' + name.rpartition('/')[2]!r}."


def _results(trainer: Trainer) -> list[_ResultMetric]:
    return [] if trainer._results is None else list(trainer._results.values())


def _step_metrics(trainer: Trainer) -> Iterator[_ResultMetric]:
    """The metrics that training steps have logged, each for its step alone."""
    for number in _results(trainer):
        meta = number.meta
        if meta.fx == "training_step" and meta.on_step and not meta.on_epoch:
            yield number
