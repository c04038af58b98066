"""What Ray reports of a failure, in words that name the call: who died, what found no room, what was lost.

One failure makes others. A device dies -> its peers break off their collectives -> whoever reads their
columns fails too. So a death is named where there is one, else the call that was sent first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from rlhf_lightning.controller.errors import WorkerError
from rlhf_lightning.controller.ray_types import DeviceHandle, Ref

GRACE_S = 2.0
"""After a failure, how long to wait for the death of a device that explains it."""
LONG_GRACE_S = 10.0
"""The same where a collective broke off, which another device's death is the likeliest reason for; and how
long to wait for a device that says what it made."""
_BROKEN_OFF = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process")
MIB = 2**20
_FULL = (ObjectStoreFullError, OutOfDiskError)
_DEATHS = (RayActorError, OutOfMemoryError)
"""What calls to a device that died come to; the second where Ray ended it, for lack of memory on its node."""


@dataclass(frozen=True)
class Pending:
    """A call that has not been seen to end."""

    ref: Ref
    name: str
    """Role, device and method, as errors have them."""
    actor: DeviceHandle
    """The device that runs it."""
    method: str
    """Role and method."""


def explained(err: RayError, calls: Sequence[Pending], *, reading: str) -> WorkerError:
    """The failure that explains an error.

    Args:
        err: what Ray raised.
        calls: that have not been seen to end, in the order in which they were sent.
        reading: the call whose results were waited for, if the error is not of one that is pending.
    """
    cause = _cause(err)
    broken_off = any(words in str(cause).lower() for words in _BROKEN_OFF)
    grace_s = LONG_GRACE_S if broken_off else GRACE_S
    death = first_death([(call.name, call.ref) for call in calls], grace_s=grace_s)
    if death is not None:
        return WorkerError(death)
    if isinstance(cause, WorkerError):  # names its call itself
        return WorkerError(str(cause))
    call, cause = next(_failed(calls), (None, cause))
    name = call.name if call is not None else f"reading what {reading} made"
    if isinstance(cause, _DEATHS):
        return WorkerError(f"{name}: a device's {_told(cause)}")
    if isinstance(cause, _FULL):
        return no_room(name, _size(call) if call is not None else "what is read")
    return WorkerError(f"{name}: {cause}")


def no_room(name: str, what: str) -> WorkerError:
    """The error of a full object store.

    Args:
        name: of the call.
        what: found no room.
    """
    total = ray.cluster_resources().get("object_store_memory", 0.0) / MIB
    return WorkerError(
        f"{name}: no room for {what} in Ray's object store of {total:.0f} MiB, nor on the disk behind it. "
        "Take a smaller --data.batch_size, free that disk, or start Ray with a larger store: `ray start "
        "--head --object-store-memory BYTES`, and add --strategy.address auto."
    )


@contextmanager
def room_for(name: str, size_bytes: int) -> Iterator[None]:
    """Put something of this process into the object store within.

    Args:
        name: of the call that wants it.
        size_bytes: of what is put there.

    Raises:
        WorkerError: the store is full.
    """
    try:
        yield
    except _FULL:
        raise no_room(name, f"{size_bytes / MIB:.1f} MiB of the controller") from None


def first_death(calls: Sequence[tuple[str, Ref]], *, grace_s: float = GRACE_S) -> str | None:
    """The error of the first call whose device died, which may be known only after errors that it caused."""
    deadline = time.monotonic() + grace_s
    while (found := _known_death(calls)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _known_death(calls: Sequence[tuple[str, Ref]]) -> str | None:
    errors = ((name, _error(ref)) for name, ref in calls)
    return next((f"{name}: its {_told(err)}" for name, err in errors if isinstance(err, _DEATHS)), None)


def _told(err: RayActorError | OutOfMemoryError) -> str:
    """How a device went, in words. If Ray on its node died it goes too, and Ray hears of it only later."""
    or_ray = ", or Ray on its node" if isinstance(err, ActorUnavailableError) else ""
    return f"process died{or_ray}. {err}"


def _failed(calls: Sequence[Pending]) -> Iterator[tuple[Pending, BaseException]]:
    """The calls that are known to have failed, and why."""
    for call in calls:
        if (err := _error(call.ref)) is not None:
            yield call, _cause(err)


def _error(ref: Ref) -> RayError | None:
    """How a call is known to have failed."""
    if not ray.wait([ref], timeout=0, fetch_local=False)[0]:
        return None
    try:
        ray.get(ref)
    except RayError as err:
        return err
    return None


def _cause(err: RayError) -> BaseException:
    """What was raised where the call ran, also if the call only read what a failed one should have made."""
    cause: BaseException = err
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
        cause = cause.cause
    return cause


def _size(call: Pending) -> str:
    """How large the columns are that a call made, if its device says so in time."""
    try:
        size = ray.get(call.actor.made_bytes.remote(call.method), timeout=LONG_GRACE_S)
    except RayError:
        return "its columns"
    assert isinstance(size, int)
    return f"its columns of {size / MIB:.1f} MiB"
