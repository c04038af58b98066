"""A parser whose errors are exceptions, so that all commands report errors alike."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

PICTURES = (".png", ".svg", ".pdf")
"""Endings of pictures that need no other program to be written."""


class Parser(argparse.ArgumentParser):
    """ArgumentParser of a command, which takes whole names only, and raises errors instead of exiting."""

    def __init__(self, command: str, text: str | None = None, *, add_help: bool = True) -> None:
        """Name the command.

        Args:
            command: the word behind `rlhf`.
            text: what `--help` says of it, as it stands.
            add_help: whether there is a `--help`.
        """
        super().__init__(
            prog=f"rlhf {command}",
            description=text,
            allow_abbrev=False,
            add_help=add_help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raise an error of the command line.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{message}. Try --help.")


def count(text: str) -> int:
    """The type of options that are whole numbers from 1 up.

    Raises:
        ArgumentTypeError: the text is no such number.
    """
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 up")
    return int(text)


def check_place(option: str, given: str) -> None:
    """Refuse a file that could not be written once the answer is known.

    Args:
        option: its name.
        given: the file; nothing is checked where it is empty.
    """
    path = Path(given)
    if given and (path.is_dir() or not path.parent.is_dir()):
        what = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise ValueError(f"--{option} {given}: {what}. Type a file in a directory that exists.")


def check_picture(given: str) -> None:
    """Refuse a file of `--picture` that could not be written; nothing is checked where it is empty."""
    check_place("picture", given)
    path = Path(given)
    if given and path.suffix not in PICTURES:
        raise ValueError(
            f"--picture {given}: a picture ends in {', '.join(PICTURES)}. Try {path.stem}.png or .svg."
        )
