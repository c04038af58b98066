"""Whether callbacks and loggers write files, and where."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from rlhf_lightning.stores import check_local

logger = logging.getLogger(__name__)


def leaves_files(trainer: Trainer) -> bool:
    """Return whether to write files: only in the main process, and not in a `fast_dev_run`."""
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]


def first_free(start: Path, end: str = "") -> Path:
    """Return the first of `<start>-v1<end>`, `<start>-v2<end>`, ... that does not exist."""
    return next(path for n in count(1) if not (path := start.with_name(f"{start.name}-v{n}{end}")).exists())


def keep_tables(trainer: Trainer) -> None:
    """Rename the metrics.csv of an earlier run that a CSVLogger with a `version` would delete.

    Lightning's warning that it deletes files, which is about this one alone, is left out.
    """
    warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
    for writer in trainer.loggers if leaves_files(trainer) else ():
        if not isinstance(writer, CSVLogger) or writer._experiment is not None or writer._version is None:
            continue  # a later run of the same logger adds to its table; without a version each has its own
        keep(Path(writer.log_dir) / ExperimentWriter.NAME_METRICS_FILE)


def keep(file: Path) -> None:
    """Rename a file of an earlier run, if there is one, that this run would replace."""
    if file.is_file():
        kept = first_free(file.with_suffix(""), file.suffix)
        file.rename(kept)
        logger.warning("%s is of an earlier run; it is %s now.", file, kept.name)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of writing a file name it: those of Python name none once it is open.

    Raises:
        OSError: as it was raised, with `path` as its file name.
    """
    try:
        yield
    except OSError as err:
        raise OSError(err.errno, err.strerror, str(path)) from err


@contextmanager
def whole(path: Path) -> Iterator[TextIO]:
    """A file to write that replaces `path` once it is complete; what is not complete is removed.

    Raises:
        OSError: it cannot be written; the file name is `path`.
    """
    unfinished = path.with_suffix(".unfinished")
    try:
        with named(path):
            with unfinished.open("w", encoding="utf-8") as file:
                yield file
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def put_aside(trainer: Trainer, files: Iterable[Path], *, directory: Path) -> None:
    """Move answers of another run into a new directory beside theirs, unless this run goes on from that one.

    Args:
        trainer: of the run that begins.
        files: in the directory.
        directory: into which this run will write.
    """
    found = sorted(files)
    if trainer.global_step or not found or not leaves_files(trainer):
        return
    aside = first_free(directory)
    aside.mkdir()
    for file in found:
        file.rename(aside / file.name)
    logger.warning("%s holds answers of another run; they are in %s now.", directory, aside.name)


def check_output(trainer: Trainer, directory: Path, *, name: str) -> None:
    """Refuse a directory that cannot be written, before any worker starts; it is not created.

    Args:
        trainer: of the run.
        directory: where files will be written; the nearest directory above it is tried.
        name: of the callback, for the message.
    """
    if not leaves_files(trainer):
        return
    check_local(directory, option=f"{name}: directory")
    above = (directory.absolute(), *directory.absolute().parents)
    try:
        with TemporaryFile(dir=next(path for path in above if path.exists())):
            pass
    except OSError as err:
        raise ValueError(
            f"{name}: {directory} cannot be written ({err.strerror}). Type another path for it, or another "
            "--trainer.default_root_dir."
        ) from err


def checkpoint_directories(trainer: Trainer | None) -> dict[Path, str]:
    """The directories into which a run will write checkpoints, and the name of a callback that does."""
    if trainer is None or trainer.state.fn != "fit" or not leaves_files(trainer):
        return {}
    found = keepers(trainer)
    return {Path(keeper.dirpath).absolute(): type(keeper).__name__ for keeper in found if keeper.dirpath}


def keepers(trainer: Trainer) -> list[ModelCheckpoint]:
    """The trainer's callbacks that keep checkpoints."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def keeps_last(trainer: Trainer) -> bool:
    """Whether there is a checkpoint that `ckpt_path="last"` would find."""
    return any(keeper._find_last_checkpoints(trainer) for keeper in keepers(trainer))


def output_path(trainer: Trainer, given: str | None, name: str) -> Path:
    """Return the path that the user gave, or else `name` under the trainer's `default_root_dir`."""
    return Path(trainer.default_root_dir) / name if given is None else Path(given)
