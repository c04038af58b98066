"""Checks values of dataclass fields against the declared types, which Python itself does not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Iterator
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
"""Types of the values that a field of each type may have; numbers of numpy and torch count as numbers."""


def check_types(holder: object, *, name: str = "") -> None:
    """Refuse texts, numbers and dataclasses that are not of their fields' types; defaults are not checked.

    Args:
        holder: an object of a dataclass, whose fields may be dataclasses too.
        name: prefix of its fields in messages, such as `actor`; its class where empty.

    Raises:
        ValueError: a field's value is of another type, none of the words that it may be, or not finite.
    """
    hints = type_hints(cast("Hashable", type(holder)))
    for field in dataclasses.fields(cast("DataclassInstance", holder)):
        hint, value = hints.get(field.name), getattr(holder, field.name, field.default)  # may be set later
        if hint is None or value is field.default:
            continue
        given = f"{field.name}={value!r}"
        where = f"{name}.{given}" if name else f"{type(holder).__name__}({given})"
        if not _fits(value, hint):
            raise ValueError(f"{where}: has to be {' or '.join(_described(hint))}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}: is not a finite number. Type one, or leave {field.name} out.")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_types(value, name=f"{name}.{field.name}" if name else field.name)


def check_names(owner: str, option: str, names: object) -> None:
    """Refuse one text where several names are wanted, which would be read letter by letter, and a method."""
    if callable(names):
        raise ValueError(f"{owner}.{option} is a method. Put @property above it.")
    if isinstance(names, str):
        raise ValueError(
            f"{owner}.{option}={names!r}: is one text, which is read letter by letter. Write ({names!r},), "
            "with the comma."
        )


@cache
def type_hints(cls: Hashable) -> dict[str, object]:
    """The types of a class's fields; empty where one of them means nothing while a program runs."""
    try:
        return get_type_hints(cls)
    except (NameError, AttributeError, TypeError, SyntaxError):  # meant for type checkers or readers only
        return {}


def _fits(value: object, hint: object) -> bool:
    if get_origin(hint) is Literal:
        return any(_is_word(value, word) for word in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is tuple:  # those of YAML are lists
        parts, several = get_args(hint), isinstance(value, Collection) and not isinstance(value, str)
        return several and (Ellipsis in parts or len(cast("Collection[object]", value)) == len(parts))
    if dataclasses.is_dataclass(hint):  # any class of the user's own will do, such as a loss
        return type(value).__module__ != "builtins"
    taken = _TAKEN.get(hint) if isinstance(hint, type) else None
    # To Python a bool is an int; here it is not.
    return taken is None or (isinstance(value, taken) and (hint is bool or not isinstance(value, bool)))


def _is_word(value: object, word: object) -> bool:
    """Whether a value is a word of a Literal: numpy's and enumerations' texts may be, a bool is no number."""
    alike = isinstance(value, bool) == isinstance(word, bool)
    return alike and isinstance(value, type(word)) and value == word


def _described(hint: object) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from map(repr, get_args(hint))
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _described(part)
    else:
        yield "None" if hint is NoneType else f"of type {hint.__name__ if isinstance(hint, type) else hint}"
