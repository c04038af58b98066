"""A parser whose errors are exceptions, so that all commands report errors alike."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises errors instead of exiting."""

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
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 up")
    return int(text)
