"""How long the controller waits for calls over Ray, what it says then, and what goes with a call."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import torch
from ray.exceptions import ActorDiedError, RayError

from rlhf_lightning.controller import Batch, WorkerError, WorkerGroup, WorkerTimeoutError
from rlhf_lightning.controller.block import encode
from rlhf_lightning.controller.call import Call, ColumnInput
from rlhf_lightning.controller.column import Column
from rlhf_lightning.controller.parcel import unpacked
from rlhf_lightning.controller.ray_transport import RayFuture, RayTransport
from rlhf_lightning.controller.ray_types import DeviceHandle, Ref
from rlhf_lightning.parallel import ParallelLayout
from tests.ray.echo import Echo, transport_of
from tests.unit.controller.devices import echo_on
from tests.unit.controller.ray_pretended import Actor, Pretended, pretending, raised, report

TIMEOUT_S = 10.0


class Owner:
    """Counts how often it is told to end."""

    spans_nodes = False
    closed = 0

    def __init__(self, actors: list[DeviceHandle]) -> None:
        self.actors = actors
        self.labels = [f"device {rank}" for rank in range(len(actors))]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def there() -> Iterator[Pretended]:
    with pretending() as found:
        yield found


def ping(device: int) -> Call:
    return Call("echo", "ping", device, 0, (), {"number": 4}, ())


def sent(refs: Sequence[Ref]) -> RayTransport:
    """A transport with a call under way for each of these ends, each on a device of its own."""
    actors = [Actor(submit=lambda *_, ref=ref: ref) for ref in refs]
    transport = RayTransport(Owner([actor.handle for actor in actors]), timeout_s=TIMEOUT_S)
    for device in range(len(refs)):
        transport.submit(device, ping(device), [])
    return transport


def test_whoever_makes_progress_is_waited_for(there: Pretended) -> None:
    transport = sent([there.ref(report(), made_s=made_s) for made_s in (35.0, 9.0, 18.0, 27.0)])
    assert len(transport.drain()) == 4
    assert there.now == 35.0
    assert transport.drain() == []


def test_calls_of_which_none_ends_are_named_after_the_timeout(there: Pretended) -> None:
    transport = sent([there.ref(report(), made_s=made_s) for made_s in (2.0, *[99.0] * 5)])
    waiting = ", ".join(rf"echo\[rank {device}, device {device}\]\.ping" for device in range(1, 5))
    with pytest.raises(
        WorkerTimeoutError, match=rf"^no call ended for 1\d s; still waiting for {waiting}\.$"
    ):
        transport.drain()
    assert TIMEOUT_S + 2 < there.now < TIMEOUT_S + 4


def test_a_call_is_named_by_its_device_and_node(there: Pretended) -> None:
    owner = Owner([Actor(submit=lambda *_: there.ref(ActorDiedError())).handle])
    owner.labels = ["device 0 on node-a"]
    transport = RayTransport(owner, timeout_s=TIMEOUT_S)
    transport.submit(0, ping(0), [])
    with pytest.raises(WorkerError, match=r"^echo\[rank 0, device 0 on node-a\]\.ping: its process died\."):
        transport.drain()


def test_a_value_that_does_not_come_is_told(there: Pretended) -> None:
    late = there.ref(report(), made_s=1.0, here_s=99.0)
    transport = RayTransport(Owner([Actor(submit=lambda *_: late).handle]), timeout_s=TIMEOUT_S)
    made = transport.submit(0, ping(0), [])
    with pytest.raises(WorkerTimeoutError, match=r"^what calls have made did not come .* in 10 s: the netw"):
        transport.fetch([made.report])


def test_what_is_read_twice_is_waited_for_once(there: Pretended) -> None:
    """Ray refuses to wait for the same object twice, and only for what has not come at once."""
    shard = {"x": encode(torch.zeros(1)), "y": encode(torch.ones(1))}
    refs = [there.ref(shard, made_s=3.0), there.ref(report(), made_s=3.0)]
    transport = RayTransport(Owner([Actor(submit=lambda *_: refs).handle]), timeout_s=TIMEOUT_S)
    made = transport.submit(0, Call("echo", "make", 0, 1, (), {}, ("x", "y")), [])
    futures = [made.columns["x"], made.report, made.columns["y"], made.report]
    x, first, y, second = transport.fetch(futures)
    assert (x, y) == (shard["x"], shard["y"])
    assert first == second == pickle.loads(report())  # noqa: S301 - our own


@pytest.mark.parametrize("made_s", [0.0, 5.0])
def test_a_failure_is_told_once(there: Pretended, made_s: float) -> None:
    error: RayError = raised(ValueError("wrong"))
    transport = sent([there.ref(report(), made_s=99.0), there.ref(error, made_s=made_s)])
    with pytest.raises(WorkerError, match=r"^echo\[rank 1, device 1\]\.ping: wrong$"):
        transport.drain()
    assert transport.drain() == []
    assert there.now < TIMEOUT_S


@pytest.mark.parametrize("read", [0, 1], ids=["another", "failed"])
def test_a_failure_ends_the_wait_for_a_value(there: Pretended, read: int) -> None:
    refs = [there.ref(report(), made_s=99.0), there.ref(raised(ValueError("wrong")), made_s=5.0)]
    transport = sent(refs)
    with pytest.raises(WorkerError, match=r"^echo\[rank 1, device 1\]\.ping: wrong$"):
        transport.fetch([RayFuture(refs[read], transport, None, "echo.ping")])
    assert there.now < TIMEOUT_S


def test_what_a_call_that_failed_before_has_not_made_is_told_when_it_is_read(there: Pretended) -> None:
    transport = sent([])
    future = RayFuture(there.ref(raised(ValueError("wrong"))), transport, None, "echo.make")
    with pytest.raises(WorkerError, match=r"^reading what echo\.make made: wrong$"):
        transport.fetch([future])


def test_a_shard_goes_once_with_a_call_that_reads_its_columns(there: Pretended) -> None:
    ended, kept = there.ref(report()), [there.ref({}) for _ in range(2)]
    left = [*kept]
    device = Actor(submit=lambda *_: [left.pop(0), ended] if left else ended)
    transport = RayTransport(Owner([device.handle]), timeout_s=TIMEOUT_S)
    make = Call("echo", "make", 0, 1, (), {}, ("x", "y"))
    first, second = (transport.submit(0, make, []).columns for _ in range(2))
    blocks = [first["x"], second["x"], first["y"]]
    picked = tuple(ColumnInput(name, (slice(0, 1),)) for name in "abc")
    transport.submit(0, Call("echo", "total", 0, 1, picked, {}, ()), blocks)
    packed, *shards = device.submit.calls[-1]
    assert shards == kept
    parcel = unpacked(cast(bytes, packed))
    assert parcel.sources == ((0, "x"), (1, "x"), (0, "y"))


@pytest.mark.parametrize(("spans_nodes", "results"), [(False, 2), (True, 3)])
def test_ray_is_told_of_a_result_for_the_report_and_for_each_shard(
    there: Pretended, spans_nodes: bool, results: int
) -> None:
    device = Actor(submit=lambda *_: [there.ref({}) for _ in range(results)])
    owner = Owner([device.handle])
    owner.spans_nodes = spans_nodes
    RayTransport(owner, timeout_s=TIMEOUT_S).submit(0, Call("echo", "make", 0, 1, (), {}, ("x", "y")), [])
    assert device.submit.chosen == [{"num_returns": results}]


def test_a_bare_call_sends_no_parcel_and_is_made_once(there: Pretended) -> None:
    device = Actor(ask=lambda: there.ref(report("pid")), submit=lambda *_: there.ref(report()))
    transport = RayTransport(Owner([device.handle]), timeout_s=TIMEOUT_S)
    for _ in range(2):
        transport.submit(0, Call("echo", "pid", 0, 0, (), {}, ()), [])
    assert device.ask.chosen == [{"name": "DeviceActor.echo.0.pid"}]
    assert (device.ask.calls, device.submit.calls) == ([(), ()], [])
    for other in (ping(0), Call("echo", "pid", 0, 1, (), {}, ())):
        transport.submit(0, other, [])
    assert (len(device.ask.calls), len(device.submit.calls)) == (2, 2)


def test_a_large_block_is_put_into_the_store_once(there: Pretended) -> None:
    device = Actor(submit=lambda *_: [there.ref({}), there.ref(report())])
    transport = RayTransport(Owner([device.handle]), timeout_s=TIMEOUT_S)
    role = Echo(WorkerGroup("echo", transport, ParallelLayout(), (0,)))
    rows = Batch.of({"x": torch.ones(4, 100_000)})
    for _ in range(2):
        role.double(rows)
    (first,), (second,) = (shards for _, *shards in device.submit.calls)
    assert first is second


def test_nothing_is_waited_for_once_it_is_closed(there: Pretended) -> None:
    transport = sent([there.ref(report(), made_s=99.0)])
    transport.close()
    assert transport.drain() == []
    assert there.now == 0
    assert isinstance(transport._owner, Owner)
    assert transport._owner.closed == 1


def test_what_a_run_has_made_goes_with_its_devices(there: Pretended) -> None:
    """Ray would start anew to look for it, and the next run would take that Ray."""
    refs = [there.ref({"x": encode(torch.zeros(1))}), there.ref(report())]
    over = RayTransport(Owner([Actor(submit=lambda *_: refs).handle]), timeout_s=TIMEOUT_S)
    made = over.submit(0, Call("echo", "make", 0, 1, (), {}, ("x",)), [])
    over.close()
    said = r'^the run is over, and its columns went with its devices: read them within step, or keep batch\["'
    for future in (made.columns["x"], made.report):
        with pytest.raises(WorkerError, match=said):
            over.fetch([future])
    device = Actor(submit=lambda *_: there.ref(report()))
    again = RayTransport(Owner([device.handle]), timeout_s=TIMEOUT_S)
    reads = Call("echo", "total", 0, 1, (ColumnInput("x", (slice(0, 1),)),), {}, ())
    with pytest.raises(WorkerError, match=said):
        again.submit(0, reads, [made.columns["x"]])
    assert device.submit.calls == []


def test_columns_go_to_no_run_with_another_strategy(there: Pretended) -> None:
    refs = [there.ref({"x": encode(torch.zeros(1, 2))}), there.ref(report())]
    device = Actor(submit=lambda *_: refs)
    over_ray = RayTransport(Owner([device.handle]), timeout_s=TIMEOUT_S)
    made = over_ray.submit(0, Call("echo", "make", 0, 1, (), {}, ("x",)), []).columns["x"]
    rows = Batch.of({"x": torch.zeros(1, 2)})
    ray_role = Echo(WorkerGroup("echo", over_ray, ParallelLayout(), (0,)))
    ray_rows, own_role = Batch({"x": Column.of(made, 1)}, num_rows=1), echo_on(ParallelLayout())
    own_rows = own_role.double(rows)
    said = r'^a column is of a run with another strategy, .* hand on batch\["scores"\] itself'
    for role, other in ((ray_role, own_rows), (own_role, ray_rows)):
        with pytest.raises(WorkerError, match=said):
            role.double(other)
    for mixed in (Batch.joined([ray_rows, own_rows]), Batch.joined([own_rows, ray_rows])):
        with pytest.raises(WorkerError, match=said):
            print(mixed["x"])  # noqa: T201
    assert len(device.submit.calls) == 1


def test_a_handle_of_a_run_that_is_over_says_so(there: Pretended) -> None:
    owner = Owner([Actor(submit=lambda *_: there.ref(report())).handle])
    role = Echo(WorkerGroup("echo", RayTransport(owner, timeout_s=TIMEOUT_S), ParallelLayout(), (0,)))
    role.ping(number=1)
    transport_of(role).close()
    with pytest.raises(WorkerError, match=r"^echo\.ping: the run is over, and its devices .* trainer\.fit,"):
        role.ping(number=1)
