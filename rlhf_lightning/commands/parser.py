"""A parser that raises what it does not understand, so that all commands report errors alike."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """ArgumentParser without `sys.exit`."""

    def error(self, message: str) -> NoReturn:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{message}. Try --help.")


def count(text: str) -> int:
    """A whole number from 1 up.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 up")
    return int(text)
