"""The configuration of a command, beside what the run writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from rlhf_lightning.output import check_output, first_free


class SaveConfig(SaveConfigCallback):
    """Write the configuration once the run has been accepted, and over none that it was read from.

    It goes to the directory of the run's first logger where that has one for each run, as TensorBoard and CSV
    do, else to the trainer's `default_root_dir`: Lightning's own would go to where other loggers keep
    directories for all runs, by default the present one.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Namespace,
        *,
        config_filename: str = "config.yaml",
        given: Sequence[str] = (),
    ) -> None:
        """Say what is written, and over which files not.

        Args:
            parser: which writes.
            config: what is written.
            config_filename: its name.
            given: configuration files of the command line.
        """
        super().__init__(parser, config, config_filename, overwrite=True)
        self.given = [Path(path) for path in given]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a directory that cannot be written."""
        check_output(trainer, _directory(trainer), name=self.config_filename)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the configuration, now that nothing has been refused."""
        if not self.already_saved:
            path = _directory(trainer) / self.config_filename
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and any(map(path.samefile, self.given)):
                path = first_free(path.with_suffix(""), path.suffix)
            self.parser.save(self.config, path, skip_none=False, overwrite=True, multifile=self.multifile)
            self.already_saved = True

    on_validation_start = on_predict_start = on_fit_start


def _directory(trainer: Trainer) -> Path:
    """Where the configuration goes."""
    first = next(iter(trainer.loggers), None)
    log_dir = first.log_dir if isinstance(first, CSVLogger | TensorBoardLogger) else None
    return Path(log_dir or trainer.default_root_dir)
