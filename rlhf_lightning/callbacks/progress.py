"""Lightning's progress bar, with the right numbers for a run that counts iterations."""

from __future__ import annotations

from lightning.pytorch.callbacks import RichProgressBar


class Progress(RichProgressBar):
    """A bar an epoch: as many iterations as it has, or as `max_steps` leaves of them.

    Lightning's own shows the last of -1 epochs where `max_steps` is the limit, and of a run that goes on from
    a checkpoint the iterations that are left, not those of the epoch. The command line puts this one there.
    """

    @property
    def total_train_batches(self) -> int | float:
        """Iterations of this epoch, those before a checkpoint that the run goes on from among them."""
        trainer, number = self.trainer, self.trainer.num_training_batches
        if trainer.max_steps < 0:
            return number
        # Within an epoch it is asked only where there is no bar yet; else the count is of the epoch before.
        count = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        done = count if self.train_progress_bar_id is None else 0
        return min(number, done + trainer.max_steps - trainer.global_step)

    def _get_train_description(self, current_epoch: int) -> str:
        said = super()._get_train_description(current_epoch)
        return said if self.trainer.max_epochs != -1 else said.replace("/-2", "", 1)
