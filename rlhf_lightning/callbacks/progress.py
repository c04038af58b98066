"""Lightning's progress bar, counting iterations, and why they ended early."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, RichProgressBar


class Progress(RichProgressBar):
    """A bar for each epoch, as long as its iterations or as far as `max_steps` allows.

    Lightning's own shows `-1` epochs where `max_steps` is the limit, and after a resume only the iterations
    that are left, not all of the epoch. The command line uses this one instead.
    """

    @property
    def total_train_batches(self) -> int | float:
        """Iterations of this epoch, those before a checkpoint from which the run resumed included."""
        trainer, number = self.trainer, self.trainer.num_training_batches
        if trainer.max_steps < 0:
            return number
        # Without a bar the count is of this epoch, resumed in its middle; with one it is of the epoch before.
        count = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        done = count if self.train_progress_bar_id is None else 0
        return min(number, done + trainer.max_steps - trainer.global_step)

    def _get_train_description(self, current_epoch: int) -> str:
        text = super()._get_train_description(current_epoch)
        return text if self.trainer.max_epochs != -1 else text.replace("/-2", "", 1)


def early_stops(trainer: Trainer) -> list[str]:
    """Why each EarlyStopping that ended a run did so; Lightning says it where it is `verbose` alone."""
    callbacks = trainer.callbacks if trainer.should_stop else ()  # type: ignore[attr-defined]
    limit = f" of {trainer.max_steps}" if trainer.max_steps > 0 else ""
    return [
        f"EarlyStopping ended the run after {trainer.global_step}{limit} iterations: "
        f"{callback.stopping_reason_message.removesuffix(' Signaling Trainer to stop.')}"
        for callback in callbacks
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message and not callback.verbose
    ]
