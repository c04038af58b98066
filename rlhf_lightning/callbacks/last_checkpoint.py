"""The newest state of a fit under one name, for `--ckpt_path last`."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from rlhf_lightning.callbacks.output import leaves_files

_NAME = "last"


class LastCheckpoint(ModelCheckpoint):
    """Keep `last.ckpt`: written every few iterations and once more when training ends."""

    def __init__(self, directory: str | Path, *, every_n_steps: int = 10) -> None:
        """Say where and how often.

        Args:
            directory: of the checkpoint.
            every_n_steps: iterations from one to the next.

        Raises:
            ValueError: they are none.
        """
        if every_n_steps < 1:
            raise ValueError(
                f"LastCheckpoint(every_n_steps={every_n_steps}): must be at least 1. For one at the end "
                "alone type a number above trainer.max_steps."
            )
        super().__init__(
            dirpath=directory,
            filename=_NAME,
            every_n_train_steps=every_n_steps,
            enable_version_counter=False,
        )
        self._every_n_steps = every_n_steps

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what the iterations after the last checkpoint have learned."""
        super().on_train_end(trainer, pl_module)
        if leaves_files(trainer) and trainer.global_step % self._every_n_steps:
            trainer.save_checkpoint(Path(str(self.dirpath)) / f"{_NAME}{self.FILE_EXTENSION}")
