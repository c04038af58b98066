"""Dataclass fields as options of algorithms and strategies, for Python and for the command line alike."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast, dataclass_transform, get_args, get_type_hints

from rlhf_lightning.field_types import type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

_FACTORY = "unless_given"
"""Key of a field's metadata: the factory of its value."""


def unless_given(*, factory: Callable[[], T]) -> T:
    """A field that is None until `complete` makes its value, unless one was given.

    In configurations it is null, so that its many numbers do not hide the other options.

    Args:
        factory: makes the value.
    """
    return cast(T, dataclasses.field(default=None, metadata={_FACTORY: factory}))


@dataclass_transform(
    kw_only_default=True, eq_default=False, field_specifiers=(dataclasses.field, unless_given)
)
def options(cls: type[T]) -> type[T]:
    """Class decorator: a keyword-only dataclass, whose constructor is kept if it or a base wrote its own.

    Raises:
        ValueError: its `__post_init__` leaves out that of the class that it extends, or a type means nothing.
    """
    _check_post_init(cls)
    made = getattr(cls, "__dataclass_params__", None)
    by_hand = "__init__" in vars(cls) or (made is not None and not made.init)
    dataclasses.dataclass(kw_only=True, eq=False, repr=False, init=not by_hand)(cls)
    # The command line reads the constructor's types. They are resolved here, where the class is defined: the
    # module of a subclass may not import the names that its base's types use.
    hints = _resolved(cls.__init__, cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in hints and _FACTORY in field.metadata:
            hints[field.name] |= None
        field.type = hints.get(field.name, field.type)
        for inner in dataclasses_in(field.type):
            _resolve_types(inner)
    cls.__init__.__annotations__ = hints
    return cls


def _resolved(owner: Callable[..., object], cls: type) -> dict[str, Any]:
    """The types of a class's fields, or of its constructor's arguments.

    Raises:
        ValueError: one names what is not there while the program runs, or not yet.
    """
    try:
        return get_type_hints(owner)
    except NameError as err:
        raise ValueError(
            f"{cls.__name__}: the type of a field names {err.name}, which is not there where the class is "
            "defined. Define or import it above the class, and not under TYPE_CHECKING: types say what the "
            "options are."
        ) from err


def _check_post_init(cls: type) -> None:
    own = vars(cls).get("__post_init__")
    base = next((base for base in cls.__mro__[1:] if "__post_init__" in vars(base)), None)
    if base and isinstance(own, FunctionType) and "__post_init__" not in own.__code__.co_names:
        raise ValueError(
            f"{cls.__name__}.__post_init__ leaves out that of {base.__name__}, which it extends. Begin it "
            "with super().__post_init__()."
        )


def check_free(cls: type, taken: Collection[str]) -> None:
    """Refuse options of names that the class which they extend uses itself, and would overwrite or call."""
    for field in dataclasses.fields(cls):
        if field.name in taken:
            raise ValueError(
                f"{cls.__name__}.{field.name}: the name is in use, in RLHFAlgorithm or in Lightning. Call "
                f"the field something else, such as own_{field.name.strip('_')}."
            )


def _resolve_types(cls: type) -> None:
    """Resolve the types in a dataclass's constructor, where the command line reads them.

    Types of inherited options are texts there, which its own module may not be able to resolve.
    """
    constructor = vars(cls).get("__init__")
    if constructor is not None and any(
        isinstance(hint, str) for hint in constructor.__annotations__.values()
    ):
        hints = _resolved(cls, cls)
        constructor.__annotations__ = {name: hints.get(name) for name in constructor.__annotations__}


def dataclasses_in(hint: object) -> list[type]:
    """The dataclasses in a type, such as both of `A | B | None`."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    return [cls for part in get_args(hint) for cls in dataclasses_in(part)]


def factory(field: dataclasses.Field[T]) -> object:
    """What makes a field's value where none is given; MISSING where nothing has to."""
    return field.metadata.get(_FACTORY, field.default_factory)


def complete(holder: object) -> None:
    """Make the values of `unless_given` fields that are None, in place."""
    for field in dataclasses.fields(cast("DataclassInstance", holder)):
        if _FACTORY in field.metadata and vars(holder)[field.name] is None:
            setattr(holder, field.name, field.metadata[_FACTORY]())


def option_paths(owner: object) -> list[str]:
    """The options of a class, then with dots those of the dataclasses among them."""
    names, nested = option_names(owner), option_classes(owner)
    inside = ((name, nested[name]) for name in names if name in nested)
    return [*names, *(f"{name}.{path}" for name, inner in inside for path in option_paths(inner))]


def has_option(owner: object, path: str) -> bool:
    """Whether a class has an option, which with dots is one of the dataclasses among its options."""
    name, dot, rest = path.partition(".")
    return name in option_names(owner) and (not dot or has_option(option_classes(owner).get(name), rest))


def option_names(owner: object) -> list[str]:
    """Names of the options of a class; none of a constructor's `*args` and `**kwargs`."""
    parameters = inspect.signature(owner).parameters.values() if isinstance(owner, type) else ()
    return [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def option_classes(owner: object) -> dict[str, type]:
    """Classes of the options that are dataclasses, by name of the option."""
    found: dict[str, type] = {}
    if isinstance(owner, type) and dataclasses.is_dataclass(owner):
        hints = type_hints(owner)
        for field in dataclasses.fields(owner):
            made = (factory(field), *dataclasses_in(hints.get(field.name, field.type)))
            first = next((each for each in made if isinstance(each, type)), None)
            if first is not None and dataclasses.is_dataclass(first):
                found[field.name] = first
    return found
