"""What callbacks of validations refuse."""

from __future__ import annotations

from lightning.pytorch import Trainer


def check_validates(trainer: Trainer, stage: str, *, name: str) -> None:
    """Refuse a fit that never validates.

    Args:
        trainer: of the run.
        stage: of `Callback.setup`.
        name: of the callback, for the message.

    Raises:
        ValueError: `limit_val_batches` is 0.
    """
    if stage == "fit" and not trainer.limit_val_batches:
        raise ValueError(
            f"{name}: with trainer.limit_val_batches=0 nothing is ever validated. "
            "Try --trainer.limit_val_batches 1.0."
        )
