"""The check of callbacks that need a validation."""

from __future__ import annotations

from lightning.pytorch import Trainer

from rlhf_lightning.data import row_data
from rlhf_lightning.data_checks import check_held_out


def check_validates(trainer: Trainer, stage: str, *, name: str) -> None:
    """Refuse a fit that never validates, and a validation on nothing.

    Args:
        trainer: of the run.
        stage: of `Callback.setup`.
        name: of the callback, for the message.

    Raises:
        ValueError: `limit_val_batches` is 0, or the data holds nothing out.
    """
    if stage == "fit" and not trainer.limit_val_batches:
        raise ValueError(
            f"{name}: with trainer.limit_val_batches=0 nothing is ever validated. "
            "Try --trainer.limit_val_batches 1.0."
        )
    data = row_data(trainer)
    if stage in ("fit", "validate") and data is not None:
        check_held_out(data, what=name)
