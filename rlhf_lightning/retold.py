"""Errors about what the user wrote, retold by who knows where it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def retold(say: Callable[[str], str]) -> Iterator[None]:
    """Within this context a ValueError has the message that `say` makes of its own.

    Raises:
        ValueError: one was raised within; it is that one where `say` has nothing to add.
    """
    try:
        yield
    except ValueError as err:
        if (told := say(str(err))) == str(err):
            raise
        raise ValueError(told) from err
