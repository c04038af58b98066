"""The parser's complaints on one line: what was typed, what is wrong with it, what there is instead."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType

_TRIED = re.compile(
    r"- (Expected a <class '(NoneType|list)'>|Expected a path but|Does not validate)|"
    r"Does not validate|Subtypes:|Errors:|Given value|$"
)
"""Lines about the types that were tried in vain."""
_UNKNOWN = re.compile(r"(?i:option '|unrecognized arguments: --)([\w.]+)")
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_CLASS = re.compile(r"class_path '([\w.]+)'")


def refusal(
    message: str, owners: Mapping[str, type], *, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Shorten a message of the parser, and add the options that an unknown one may have been meant for.

    Args:
        message: of an error of jsonargparse.
        owners: the classes whose options have a fixed prefix, by that prefix.
        elsewhere: what to type instead of options that these classes have and the command does not take.
    """
    lines = [line.strip() for line in message.splitlines()]
    said = " ".join(line.removeprefix("- ") for line in lines if not _TRIED.match(line))
    said = re.sub(r'Parser key "([\w.]+)":', r"\1:", said)
    said = re.sub(r"Problem with given class_path '([\w.]+)':", r"\1:", said)
    unknown = _UNKNOWN.search(message)
    if unknown is None:
        return said
    return f"{said}. {elsewhere.get(unknown[1]) or _known(unknown[1], _CLASS.findall(message), owners)}"


def _known(option: str, classes: Sequence[str], owners: Mapping[str, type]) -> str:
    """What an unknown option was meant for, or else the options there are."""
    *path, name = option.split(".")
    tried = [_load(cls) for cls in classes]
    owner: object = next((cls for cls in reversed(tried) if _options(cls)), None)
    if tried and owner is None:
        return "Name the class before its options, such as --algo ppo or --data promptdata."
    for part in path:
        owner = owners.get(part) if owner is None else _default_types(owner).get(part)
    if not isinstance(owner, type):
        return "Try --help."
    names = _options(owner)
    begun = [known for known in names if known.startswith(name)]
    close = begun or get_close_matches(name, names, n=1)
    return f"Did you mean {close[0]}?" if close else f"{owner.__name__} has: {', '.join(names)}."


def _options(owner: object) -> list[str]:
    """The options of a class by name; of a base that takes any, none."""
    parameters = inspect.signature(owner).parameters.values() if isinstance(owner, type) else ()
    return [parameter.name for parameter in parameters if parameter.kind not in _ANY]


def _default_types(owner: object) -> dict[str, object]:
    """The classes of the options that are objects themselves."""
    fields = dataclasses.fields(owner) if isinstance(owner, type) and dataclasses.is_dataclass(owner) else ()
    return {field.name: field.default_factory for field in fields}


def _load(path: str) -> object:
    module, _, name = path.rpartition(".")
    found: object = getattr(importlib.import_module(module), name)
    return found
