"""Values of fields against the types that they are declared with: in Python nothing else compares them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from functools import cache
from os import PathLike
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Literal,
    SupportsFloat,
    SupportsIndex,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_TAKEN: dict[type, type | UnionType] = {
    int: SupportsIndex,
    float: SupportsFloat,
    bool: bool | np.bool_,
    str: str | PathLike,
    NoneType: NoneType,
}
"""What a value may be where a field is of such a type, numbers of numpy and torch too."""


def check_types(holder: object, *, name: str = "") -> None:
    """Refuse words, numbers and dataclasses that are not of the types of their fields; defaults pass.

    Args:
        holder: a dataclass.
        name: what its fields are called by; its class where empty.

    Raises:
        ValueError: a field has another type, or is none of the words that it may be.
    """
    hints = _hints(cast("Hashable", type(holder)))
    for field in dataclasses.fields(cast("DataclassInstance", holder)):
        hint, value = hints.get(field.name), getattr(holder, field.name, field.default)  # or set later
        if hint is not None and value is not field.default and not _fits(value, hint):
            given = f"{field.name}={value!r}"
            said = f"{name}.{given}" if name else f"{type(holder).__name__}({given})"
            raise ValueError(f"{said}: has to be {' or '.join(_described(hint))}.")


@cache
def _hints(cls: Hashable) -> dict[str, object]:
    try:
        return get_type_hints(cls)
    except (NameError, AttributeError, TypeError, SyntaxError):  # for type checkers or readers alone
        return {}


def _fits(value: object, hint: object) -> bool:
    if get_origin(hint) is Literal:
        return any(_is_word(value, word) for word in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if dataclasses.is_dataclass(hint):  # or of any class of one's own, such as a loss
        return type(value).__module__ != "builtins"
    taken = _TAKEN.get(hint) if isinstance(hint, type) else None
    # A truth value is a number to Python, and not here.
    return taken is None or (isinstance(value, taken) and (hint is bool or not isinstance(value, bool)))


def _is_word(value: object, word: object) -> bool:
    """Words of an enumeration and of numpy are words too; a truth value is no number."""
    alike = isinstance(value, bool) == isinstance(word, bool)
    return alike and isinstance(value, type(word)) and value == word


def _described(hint: object) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from map(repr, get_args(hint))
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _described(part)
    else:
        yield "None" if hint is NoneType else f"of type {getattr(hint, '__name__', hint)}"
