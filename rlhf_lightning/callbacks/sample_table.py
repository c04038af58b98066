"""A table of sampled prompts, responses and scores for each validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.types import STEP_OUTPUT

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.callbacks.sample import Sample, printable, samples_of
from rlhf_lightning.callbacks.sample_page import index_page, sample_page
from rlhf_lightning.data_checks import check_validates
from rlhf_lightning.output import check_output, first_free, leaves_files, output_path, put_aside, whole

_COLUMNS = ["step", "prompt", "response", "score"]


class SampleTable(Callback):
    """Show the first responses of each validation: an HTML page always, wandb and TensorBoard where they log.

    It reads what `validation_step` returns: a dictionary of `prompts`, `responses` and `scores`, and
    optionally `tokens` with `kl`, `values` or `advantages` (see `samples_of`). A step that returns None shows
    nothing.

    Pages are named after the step, and outside a fit after the checkpoint that is validated, with `-v1` where
    there is one of that name. A new run moves those of an earlier one to `samples-v1`.

    Raises:
        ValueError: fewer than one row is asked for.
    """

    def __init__(self, rows: int = 16, *, per_token: bool = False, directory: str | None = None) -> None:
        """Say how much to show.

        Args:
            rows: most samples a validation.
            per_token: colour the tokens by KL, value and advantage, as far as the validation step returns
                them.
            directory: of the pages; None is `samples` under the trainer's `default_root_dir`.
        """
        super().__init__()
        if rows < 1:
            raise ValueError(
                f"SampleTable(rows={rows}): must be at least 1. Leave the callback out for no table."
            )
        self.rows = rows
        self.per_token = per_token
        self.directory = directory
        self._samples: list[Sample] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a run that never validates, or on nothing, and a directory that cannot be written."""
        check_validates(trainer, stage, name="SampleTable")
        check_output(trainer, output_path(trainer, self.directory, "samples"), name="SampleTable")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move pages of another run aside, unless this run resumed from it."""
        directory = output_path(trainer, self.directory, "samples")
        files = [*_pages(directory), *directory.glob("index.html")]
        put_aside(trainer, files, directory=directory)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a new table; only a fit has the models, such as the critic, that give numbers per token."""
        self._samples = []
        if isinstance(pl_module, RLHFAlgorithm):
            pl_module.explain_samples = self.per_token and trainer.state.fn == "fit"

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, *_: object
    ) -> None:
        """Keep the samples of a batch until the table is full.

        Raises:
            ValueError: `validation_step` returned what is no table.
        """
        if outputs is None or len(self._samples) >= self.rows:
            return
        if not isinstance(outputs, Mapping):
            raise ValueError(
                f"SampleTable: {type(pl_module).__name__}.validation_step returned a "
                f"{type(outputs).__name__}: return a dictionary of prompts, responses and scores, or None."
            )
        samples = samples_of(outputs)[: self.rows - len(self._samples)]
        self._samples += samples if self.per_token else [replace(x, tokens=(), numbers={}) for x in samples]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write and log the table; the sanity check and `fast_dev_run` leave nothing behind."""
        if not self._samples or trainer.sanity_checking or not leaves_files(trainer):
            return
        self._write_page(trainer)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table(
                    "samples",
                    columns=_COLUMNS,
                    data=self._data(trainer.global_step),
                    step=trainer.global_step,
                )
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("samples", self._markdown(), trainer.global_step)
        self._samples = []

    def _write_page(self, trainer: Trainer) -> None:
        directory = output_path(trainer, self.directory, "samples")
        directory.mkdir(parents=True, exist_ok=True)
        name, title = _name_and_title(trainer)
        file = directory / f"{name}.html"
        if trainer.state.fn != "fit" and file.exists():  # of another checkpoint of that name, maybe
            file = first_free(directory / name, ".html")
        with whole(file) as page:
            page.write(sample_page(self._samples, title=title))
        with whole(directory / "index.html") as index:
            index.write(index_page(_pages(directory)))

    def _data(self, step: int) -> list[list[object]]:
        return [[step, printable(x.prompt), printable(x.response), x.score] for x in self._samples]

    def _markdown(self) -> str:
        return "\n\n---\n\n".join(
            f"**score {x.score:.4g}**\n\n{_block(x.prompt)}\n\nresponse\n\n{_block(x.response)}"
            for x in self._samples
        )


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in printable(text).split("\n"))


def _name_and_title(trainer: Trainer) -> tuple[str, str]:
    """Of the page: the step in a fit; else the checkpoint, whose step `validate` does not restore."""
    if trainer.state.fn == "fit":
        return f"step-{trainer.global_step:06d}", f"Step {trainer.global_step}"
    if trainer.ckpt_path is None:
        return "validate", "Validation"
    return f"validate-{Path(trainer.ckpt_path).stem}", f"Validation of {trainer.ckpt_path}"


def _pages(directory: Path) -> list[Path]:
    """Pages of steps, the last first, then those of validations alone."""
    steps = sorted(directory.glob("step-*.html"), key=_step, reverse=True)
    return steps + sorted(directory.glob("validate*.html"), key=lambda page: page.stem)


def _step(page: Path) -> int:
    number = page.stem.removeprefix("step-")
    return int(number) if number.isdecimal() else -1
