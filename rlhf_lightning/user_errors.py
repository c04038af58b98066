"""Errors that are the user's to mend, shown on one line in place of a traceback."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from rlhf_lightning.controller import WorkerError, WorkerTimeoutError
from rlhf_lightning.directories import FULL

_NOT_THEIRS = ("<", f"{Path(__file__).parent}{os.sep}", *sysconfig.get_paths().values())
"""How the paths of files begin that the user did not write."""
_SET_UP = ("<module>", "__init__", "__post_init__", "setup")
"""Functions in which options are refused, where the place says nothing about the mistake."""


def user_error(err: Exception) -> str | None:
    """The message of an error to be shown without a traceback; None for an error in the program."""
    if isinstance(err, ValueError):
        place = place_of(err)
        return f"{err} ({place})" if place else str(err)
    if isinstance(err, MisconfigurationException | WorkerError | WorkerTimeoutError):
        return str(err)
    if not isinstance(err, OSError):
        return library_error(err) or None
    if err.filename is None and err.errno not in FULL:  # not about a file
        return None
    return f"{err.filename or 'the disk of trainer.default_root_dir, or of a logger'}: {err.strerror}."


def library_error(err: Exception) -> str:
    """An error that a library of the command raised about its use, on one line; empty for any other error."""
    *_, (frame, _) = traceback.walk_tb(err.__traceback__)
    said = " ".join(str(err).split())
    if type(err).__module__.startswith("wandb."):
        return f"wandb: {said} Or try --trainer.logger.offline true."
    if type(err).__module__.startswith("jsonargparse."):  # a logger's directory without room for config.yaml
        return f"{said}."
    raised_there = str(frame.f_globals.get("__name__")).startswith("lightning.")
    return said if type(err) is RuntimeError and raised_there else ""


def place_of(err: Exception) -> str:
    """Where the user's own code was when an error was raised; empty if it was not there, or in a set-up."""
    frames = [f for f in traceback.extract_tb(err.__traceback__) if not f.filename.startswith(_NOT_THEIRS)]
    if not frames or frames[0].name in _SET_UP:
        return ""
    path = Path(frames[-1].filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}, line {frames[-1].lineno}, in {frames[-1].name}"
