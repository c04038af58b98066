"""Ray as a script: when each reference comes to its end, and how; waiting for it moves a clock of its own."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from rlhf_lightning.controller import failure, ray_transport
from rlhf_lightning.controller.call import CallReport
from rlhf_lightning.controller.ray_types import DeviceHandle, Ref


@dataclass(eq=False)
class End:
    """What a reference comes to."""

    value: object
    """An error is raised."""
    made_s: float
    here_s: float
    """When it has come to this process, too."""


@dataclass
class Pretended:
    """Ray, and the clock by which it is waited for."""

    now: float = 0.0

    def ref(self, value: object, *, made_s: float = 0.0, here_s: float = 0.0) -> Ref:
        """A reference to a value, or to an error."""
        return cast(Ref, End(value, made_s, max(made_s, here_s)))

    def put(self, value: object) -> Ref:
        return self.ref(value)

    def get(self, refs: End | Sequence[End], *, timeout: float | None = None) -> object:
        ends = [refs] if isinstance(refs, End) else list(refs)
        here = max((end.here_s for end in ends), default=0.0)
        if timeout is not None and here > self.now + timeout:
            self.now += timeout
            raise GetTimeoutError
        self.now = max(self.now, here)
        for end in ends:
            if isinstance(end.value, BaseException):
                raise end.value
        return ends[0].value if isinstance(refs, End) else [end.value for end in ends]

    def wait(
        self, refs: Sequence[End], *, num_returns: int = 1, timeout: float, fetch_local: bool = True
    ) -> tuple[list[End], list[End]]:
        if len(set(refs)) < len(refs):
            raise ValueError("Wait requires a list of unique ray_waitables.")
        times = {end: end.here_s if fetch_local else end.made_s for end in refs}
        enough = sorted(times.values())[num_returns - 1]
        self.now = max(self.now, min(enough, self.now + timeout))
        ready = [end for end in refs if times[end] <= self.now]
        return ready, [end for end in refs if end not in ready]

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def pretending() -> Iterator[Pretended]:
    """Have the controller find it in the place of Ray."""
    found = Pretended()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get", "put", "wait"):
            patch.setattr(ray, name, getattr(found, name))
        patch.setattr(ray, "cluster_resources", lambda: {"object_store_memory": 100 * 2**20})
        for module in (failure, ray_transport):
            patch.setattr(module, "time", found)
        yield found


def raised(cause: Exception) -> RayTaskError:
    """What Ray makes of an error of a task."""
    return RayTaskError("a_task", "its traceback", cause)


def report(method: str = "ping") -> bytes:
    """What a device says of a call that has ended."""
    return pickle.dumps(CallReport("echo", method, 0, 0.0, 0.0, 0, None))


@dataclass
class Method:
    """A method of an actor: what it is called with, and what comes of it."""

    answer: Callable[..., object]
    calls: list[tuple[object, ...]] = field(default_factory=list)
    named: dict[str, object] = field(default_factory=dict)
    """Arguments of the last call that have names."""
    chosen: list[dict[str, object]] = field(default_factory=list)
    """Options under which it was asked for."""

    def options(self, **chosen: object) -> Method:
        self.chosen.append(chosen)
        return self

    def remote(self, *given: object, **named: object) -> object:
        self.calls.append(given)
        self.named = named
        return self.answer(*given)


class Actor:
    """An actor of which some methods are there."""

    def __init__(self, **answers: Callable[..., object]) -> None:
        self.methods = {name: Method(answer) for name, answer in answers.items()}

    def __getattr__(self, name: str) -> Method:
        return self.methods[name]

    @property
    def handle(self) -> DeviceHandle:
        return cast(DeviceHandle, self)
