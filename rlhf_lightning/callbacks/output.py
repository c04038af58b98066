"""Whether and where callbacks leave files."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

from lightning.pytorch import Trainer


def leaves_files(trainer: Trainer) -> bool:
    """Return True in the main process of a run that is no `fast_dev_run`."""
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]


def first_free(start: Path, end: str = "") -> Path:
    """Return the first of `<start>-v1<end>`, `<start>-v2<end>`, ... that is not there."""
    return next(path for n in count(1) if not (path := start.with_name(f"{start.name}-v{n}{end}")).exists())


def check_output(trainer: Trainer, directory: Path, *, name: str) -> None:
    """Refuse a directory in which nothing can be written, before any worker starts; it is not made yet.

    Args:
        trainer: of the run.
        directory: that files are to go into.
        name: of the callback, for the message.

    Raises:
        ValueError: nothing can be written there.
    """
    if not leaves_files(trainer):
        return
    above = (directory.absolute(), *directory.absolute().parents)
    try:
        with TemporaryFile(dir=next(path for path in above if path.exists())):
            pass
    except OSError as err:
        raise ValueError(
            f"{name}: {directory} cannot be written ({err.strerror}). Type another place for it, or another "
            "--trainer.default_root_dir."
        ) from err


def output_path(trainer: Trainer, given: str | None, name: str) -> Path:
    """Return the path that the user gave, or else `name` under the trainer's `default_root_dir`."""
    return Path(trainer.default_root_dir) / name if given is None else Path(given)
