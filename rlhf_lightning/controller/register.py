"""`@register(transfer=...)`: one method, called on the controller's handle, run on every worker.

algo.actor.update_actor(batch, loss=loss)       on the controller: `actor` is bound to a worker group
    -> transfer.distribute -> Device.call -> the function below the decorator, once a rank -> transfer.collect
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from tensordict import TensorDict

from rlhf_lightning.controller.batch import Batch
from rlhf_lightning.controller.futures import Gathered, Metrics, Numbers, Value
from rlhf_lightning.controller.transfer import (
    EveryRankTransfer,
    MetricTransfer,
    RowTransfer,
    SingleTransfer,
    Transfer,
)
from rlhf_lightning.field_types import check_names
from rlhf_lightning.parallel import Link, Seat

P = ParamSpec("P")
S = TypeVar("S", bound="Remote")
T = TypeVar("T")


@dataclass(frozen=True)
class Method:
    """A registered method: the function that runs on workers, and how data reach it."""

    name: str
    function: Callable[..., object]
    transfer: Transfer
    reads: tuple[str, ...] | None
    """Columns that it reads; None for all columns of the batch."""
    returns: tuple[str, ...]
    """Columns that it returns; empty for a plain value."""
    takes_rows: bool
    """Whether it has the parameter `rows`."""
    computes: bool = True
    """Whether it needs the role's model on the device; a question about a role needs none, and moves none."""


class Caller(Protocol):
    """What a bound role sends its calls through."""

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        """Run a method on the workers."""


@dataclass(frozen=True)
class Worker(Seat):
    """The place of one rank of a role, and how its model computes."""

    settings: object
    """The strategy's settings of how models compute."""
    link: Link | None = None
    """This rank's end of the link between its model and a copy on other devices; None where it has none."""
    role: str = ""
    """Name of the role, as errors call it; empty where nobody has named it."""


class Remote(ABC):
    """An object whose registered methods run on its workers if it is a handle, and here if it is a worker."""

    @abstractmethod
    def caller(self) -> Caller | None:
        """What receives the calls of a handle; None on a worker, where methods just run."""

    @abstractmethod
    def build(self, worker: Worker) -> None:
        """Make this rank's part of the model."""

    def arguments(self, method: str) -> Mapping[str, object]:
        """Default arguments of the handle for calls of a method; none by default."""
        del method
        return {}

    def offload(self) -> None:  # noqa: B027
        """Free the device until `reload`; nothing to free by default."""

    def reload(self) -> None:  # noqa: B027
        """Bring back to the device whatever was offloaded; nothing by default."""

    def reload_bytes(self) -> int:
        """Bytes that `reload` would bring back; 0 by default."""
        return 0

    def holds_gradient(self) -> bool:
        """Whether it has a gradient that no optimizer step has taken; not by default."""
        return False

    def lies_in(self, other: Remote) -> bool:
        """Whether all its memory belongs to `other`, a role on the same device; not by default."""
        del other
        return False

    def takes_all(self, method: str) -> bool:
        """Whether calls of a method take all free memory of a device; not by default."""
        del method
        return False


class RemoteMethod:
    """What `register` puts into the class: calls the function on a worker, and sends the call on a handle."""

    def __init__(self, method: Method) -> None:
        self.method = method
        functools.update_wrapper(cast(Callable[..., object], self), method.function)

    def __get__(self, instance: Remote | None, owner: type[Remote]) -> Callable[..., object]:
        if instance is None:
            return self.method.function
        return functools.partial(self._invoke, instance)

    def _invoke(self, instance: Remote, *rows: object, **arguments: object) -> object:
        caller = instance.caller()
        if caller is None:
            return self.method.function(instance, *rows, **arguments)
        arguments = {**instance.arguments(self.method.name), **arguments}
        if wrong := self._wrong(instance, rows, arguments):
            takes = ", ".join([*self._signature.parameters][1:]) or "none"
            name = f"{type(instance).__name__}.{self.method.name}"
            raise TypeError(f"{name}: {wrong}. Its parameters are {takes}.")
        return caller.call(self.method, cast(Batch, rows[0]) if rows else None, arguments)

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.method.function)

    def _wrong(self, instance: Remote, rows: Sequence[object], arguments: Mapping[str, object]) -> str:
        """What is wrong with a call; empty if nothing is."""
        named = any(isinstance(value, Batch) for value in arguments.values())
        if len(rows) > 1 or named or not all(isinstance(batch, Batch | None) for batch in rows):
            return "a remote call takes its rows, a Batch, by position and all else by name"
        for name, value in arguments.items():
            if isinstance(value, type) and hasattr(value, "columns"):
                return f"{name}={value.__name__} is a class. Give one of it, {name}={value.__name__}()"
        try:
            self._signature.bind(instance, *rows, **arguments)
        except TypeError as err:
            return str(err)
        if rows and not self.method.takes_rows:
            return "its rows come by the name `rows`, and it has no parameter called so"
        return ""


@functools.cache
def methods_of(cls: type[Remote]) -> Mapping[str, Method]:
    """The registered methods of a class by name, including inherited ones."""
    found = (vars(base) for base in reversed(cls.__mro__))
    return {k: v.method for names in found for k, v in names.items() if isinstance(v, RemoteMethod)}


@overload
def register(
    *, transfer: RowTransfer, reads: tuple[str, ...] | None = None, returns: tuple[str, ...]
) -> Callable[
    [Callable[Concatenate[S, TensorDict, P], TensorDict]], Callable[Concatenate[S, Batch, P], Batch]
]: ...
@overload
def register(
    *, transfer: MetricTransfer, reads: tuple[str, ...] | None = None
) -> Callable[
    [Callable[Concatenate[S, TensorDict, P], Numbers]], Callable[Concatenate[S, Batch, P], Metrics]
]: ...
@overload
def register(
    *, transfer: EveryRankTransfer, computes: bool = True
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], Gathered[T]]]: ...
@overload
def register(
    *, transfer: SingleTransfer, computes: bool = True
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], Value[T]]]: ...
def register(
    *,
    transfer: Transfer,
    reads: tuple[str, ...] | None = None,
    returns: tuple[str, ...] | None = None,
    computes: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method callable on the controller.

    The function below the decorator is what one worker runs on its share; the name in the class takes the
    whole batch on the controller and answers at once with futures.

    Args:
        transfer: how data reach the ranks and how results come back.
        reads: columns that the method reads, besides the `columns` of arguments such as a loss; None: all.
        returns: columns that it returns, where its result is a Batch; empty: those that an argument names.
        computes: whether it needs the role's model on the device; see `Method`.

    Raises:
        ValueError: its result is a Batch without columns, a text stands in the place of names, or it
            reads columns of rows that it does not take.
    """

    def decorate(function: Callable[..., object]) -> Callable[..., object]:
        name = function.__qualname__
        check_names(name, "reads", reads)
        check_names(name, "returns", returns)
        if returns is None and isinstance(transfer, RowTransfer):
            raise ValueError(
                f"{name}: its result is rows, of which the columns are kept that `returns` names. Name them: "
                'returns=("values",), or take DP_METRIC for metrics.'
            )
        takes_rows = "rows" in inspect.signature(function).parameters
        if reads and not takes_rows:
            raise ValueError(
                f"{name}: it reads {reads} of its rows, which come by the name `rows`, and it has no "
                f"parameter called so. Write def {function.__name__}(self, rows)."
            )
        method = Method(function.__name__, function, transfer, reads, returns or (), takes_rows, computes)
        return cast(Callable[..., object], RemoteMethod(method))

    return decorate
