"""A validation before the first training step."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from rlhf_lightning.data_checks import check_validates


class ValidateFirst(Callback):
    """Validate the models before the first step, and log the result as step 0.

    It replaces Lightning's sanity check, which logs nothing. A run that resumes from a checkpoint does not do
    it. With `val_check_interval=1` Lightning logs the validation after the first step as step 0, too.

    Raises:
        ValueError: in `setup`, where nothing is ever validated.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a run without held-out rows, and turn the sanity check off."""
        if stage == "fit":
            check_validates(trainer, stage, name=type(self).__name__)
            trainer.num_sanity_val_steps = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate, as Lightning does between two iterations."""
        if trainer.global_step == 0:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True
