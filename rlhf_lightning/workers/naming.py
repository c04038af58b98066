"""Errors of models and judges name the field that holds them, since roles are called what users like."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming_role(name: str) -> Iterator[None]:
    """Put the role's name before errors about `path` or `lora`, so that they name an option of it.

    Raises:
        ValueError: one was raised within.
    """
    try:
        yield
    except ValueError as err:
        said = str(err)
        raise ValueError(f"{name}.{said}" if said.startswith(("path=", "lora")) else said) from err


@contextmanager
def naming_judge(name: str, kind: str) -> Iterator[None]:
    """Let errors about a reward or a cost name the field that holds it, where that is called otherwise.

    Args:
        name: of the field.
        kind: what errors call it, at their beginning and in options.

    Raises:
        ValueError: one was raised within.
    """
    try:
        yield
    except ValueError as err:
        raise ValueError(re.sub(rf"^{kind}\b|(?<=--algo\.){kind}\b", name, str(err))) from err
