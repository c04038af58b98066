"""Whether and where callbacks leave files."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from lightning.pytorch import Trainer


def leaves_files(trainer: Trainer) -> bool:
    """Return True in the main process of a run that is no `fast_dev_run`."""
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]


def first_free(start: Path, end: str = "") -> Path:
    """Return the first of `<start>-v1<end>`, `<start>-v2<end>`, ... that is not there."""
    return next(path for n in count(1) if not (path := start.with_name(f"{start.name}-v{n}{end}")).exists())


def output_path(trainer: Trainer, given: str | None, name: str) -> Path:
    """Return the path that the user gave, or else `name` under the trainer's `default_root_dir`."""
    return Path(trainer.default_root_dir) / name if given is None else Path(given)
