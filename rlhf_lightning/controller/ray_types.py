"""Ray's handles as types: its own stubs refuse every method of an actor that is not decorated."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import ray

Ref: TypeAlias = "ray.ObjectRef[object]"


class SplitMethod(Protocol):
    """A method of an actor whose results each have a reference of their own."""

    def remote(self, *arguments: object) -> Ref | list[Ref]:
        """Call it and return at once: one reference bare, several as a list."""


class ActorMethod(Protocol):
    """A method of an actor."""

    def remote(self, *arguments: object, **options: object) -> Ref:
        """Call it and return at once."""

    def options(self, *, num_returns: int = 1, name: str | None = None) -> SplitMethod:
        """The same method with several results, or with a name for its tasks."""


class DeviceHandle(Protocol):
    """The actor of one device."""

    join: ActorMethod
    host: ActorMethod
    address: ActorMethod
    node_cores: ActorMethod
    made_bytes: ActorMethod
    sees: ActorMethod
    submit: ActorMethod
    ask: ActorMethod
