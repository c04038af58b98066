"""Which call a failure is told of: one whose device died, else the first that failed; and in which words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayError,
    RaySystemError,
)

from rlhf_lightning.controller import WorkerError
from rlhf_lightning.controller.failure import GRACE_S, LONG_GRACE_S, Pending, explained, room_for
from tests.unit.controller.ray_pretended import Actor, Pretended, pretending, raised

FULL = "no room for {} in Ray's object store of 100 MiB, nor on the disk behind it."
UNREACHABLE = ActorUnavailableError("RpcError: Socket closed", None)
"""What Ray knows of a device at first when the Ray of its node has died, and the device with it."""
BROKEN_OFF = raised(RuntimeError("[../gloo/pair.cc] Connection closed by peer [10.0.0.1]"))
WRONG = raised(ValueError("wrong"))
SAID = WorkerError("actor[rank 1, node a].update: said by itself")


@pytest.fixture
def there() -> Iterator[Pretended]:
    with pretending() as found:
        yield found


def pending(
    there: Pretended,
    *ends: object,
    made_s: tuple[float, ...] = (),
    bytes_made: object = 0,
    told_s: float = 0.0,
) -> list[Pending]:
    """Calls a, b, ... with these ends, at once where no time is given."""
    actor = Actor(made_bytes=lambda _: there.ref(bytes_made, here_s=told_s)).handle
    times = made_s or (0.0,) * len(ends)
    refs = [there.ref(end, made_s=time) for end, time in zip(ends, times, strict=True)]
    return [Pending(ref, name, actor, f"role.{name}") for name, ref in zip("abc", refs, strict=False)]


@pytest.mark.parametrize(
    ("error", "died_s", "name"),
    [
        (BROKEN_OFF, LONG_GRACE_S - 1, "b: its process died"),
        (BROKEN_OFF, LONG_GRACE_S + 1, "a: .*closed by peer"),
        (WRONG, GRACE_S - 1, "b: its process died"),
        (WRONG, GRACE_S + 1, "a: wrong"),
    ],
)
def test_a_death_is_waited_for_longer_where_a_collective_broke_off(
    there: Pretended, error: RayError, died_s: float, name: str
) -> None:
    calls = pending(there, error, ActorDiedError(), made_s=(0.0, died_s))
    with pytest.raises(WorkerError, match=f"^{name}"):
        raise explained(error, calls, reading="x")
    assert there.now < LONG_GRACE_S + 1


def test_a_device_that_went_with_the_ray_of_its_node_has_died(there: Pretended) -> None:
    said = str(explained(BROKEN_OFF, pending(there, BROKEN_OFF, UNREACHABLE, made_s=(0.0, 1.0)), reading="x"))
    assert said.startswith("b: its process died, or Ray on its node. The actor None is unavailable: RpcError")
    assert there.now < GRACE_S
    died = str(explained(UNREACHABLE, [], reading="x"))
    assert died.startswith("reading what x made: a device's process died, or Ray on its node. The actor")


def test_a_device_that_ray_ended_for_lack_of_memory_has_died(there: Pretended) -> None:
    ended = OutOfMemoryError("Memory on the node was 121.6GB / 128.0GB (0.95)")
    told = "its process died. Memory on the node was 121.6GB / 128.0GB (0.95)"
    said = str(explained(BROKEN_OFF, pending(there, BROKEN_OFF, ended, made_s=(0.0, 1.0)), reading="x"))
    assert said == f"b: {told}"
    assert str(explained(ended, [], reading="x")) == f"reading what x made: a device's {told[4:]}"


def test_the_first_of_several_failures_is_told(there: Pretended) -> None:
    second = raised(raised(ValueError("another")))
    calls = pending(there, "fine", second, WRONG)
    assert str(explained(WRONG, calls, reading="x")) == "b: another"
    late = pending(there, "fine", WRONG, made_s=(99.0, 0.0))
    assert str(explained(WRONG, late, reading="x")) == "b: wrong"


def test_what_names_its_call_itself_is_told_as_it_is(there: Pretended) -> None:
    error = raised(raised(SAID))
    assert str(explained(error, pending(there, WRONG, error), reading="x")) == str(SAID)


def test_a_failure_of_a_call_that_has_ended_is_of_what_was_read(there: Pretended) -> None:
    assert str(explained(WRONG, [], reading="x")) == "reading what x made: wrong"
    died = str(explained(ActorDiedError(), [], reading="x"))
    assert died.startswith("reading what x made: a device's process died. The actor died")
    assert str(explained(OutOfDiskError(), [], reading="x")).startswith(
        f"reading what x made: {FULL.format('what is read')}"
    )


@pytest.mark.parametrize("kind", [ObjectStoreFullError, OutOfDiskError])
@pytest.mark.parametrize(
    ("made", "told_s", "what"),
    [
        (3 * 2**20, 0.0, "its columns of 3.0 MiB"),
        (RaySystemError("gone"), 0.0, "its columns"),
        (3 * 2**20, 99.0, "its columns"),
    ],
    ids=["size", "none", "late"],
)
def test_a_full_store_is_told_with_what_found_no_room(
    there: Pretended, kind: type[RayError], made: object, told_s: float, what: str
) -> None:
    full = raised(kind())
    calls = pending(there, "fine", full, bytes_made=made, told_s=told_s)
    assert str(explained(full, calls, reading="x")).startswith(f"b: {FULL.format(what)}")
    given = r"^x: no room for 3\.0 MiB of the controller in"
    with pytest.raises(WorkerError, match=given), room_for("x", 3 * 2**20):
        raise kind
