"""The console command `rlhf`; what needs no trainer does without Lightning, slow to import."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from importlib import import_module

from rlhf_lightning import __version__
from rlhf_lightning.commands import COMMANDS
from rlhf_lightning.garbage import at_rest

IGNORED_WARNINGS = (
    "GPU available but not used",  # by this process: its devices use them
    "Checkpoint directory .* exists and is not empty",  # LastCheckpoint looks whose it is
    "Total length of .* across ranks is zero",  # no rows are held out
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "'set_vital' is deprecated",
)
"""Beginnings of libraries' warnings about what nobody who types a command can change."""


def main() -> None:
    """Run it."""
    arguments, sys.argv = sys.argv[1:], sys.argv[:1]
    if arguments == ["--version"]:
        sys.stdout.write(f"rlhf {__version__}\n")
        return
    for beginning in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", beginning)
    here = _directory()
    alone = arguments[:1] and arguments[0] in COMMANDS
    name = f"rlhf_lightning.commands.{arguments[0]}" if alone else "rlhf_lightning.cli"
    first = name not in sys.modules
    with at_rest():
        command = import_module(name)
        if first:
            gc.freeze()  # modules are never looked at, not even as the process ends: they live as long as it
    sys.path.insert(0, here)  # after the imports: a file may have the name of a library
    try:
        command.run(arguments[1:] if alone else arguments)
    except Exception as err:
        if (message := import_module("rlhf_lightning.user_errors").user_error(err)) is None:
            raise
        sys.stderr.write(f"rlhf: error: {message}\n")
        sys.exit(1)


def _directory() -> str:
    """The current directory; an error where it was removed, before MKL says that it cannot load torch."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        sys.stderr.write("rlhf: error: the current directory is gone. Type `cd` first.\n")
        sys.exit(1)
