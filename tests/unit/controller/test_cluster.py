"""What devices are told as they start, how those that do not are named, and what is ended afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError

from rlhf_lightning.controller import WorkerError, WorkerTimeoutError, cluster
from rlhf_lightning.controller.cluster import RayCluster
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.parallel import ParallelLayout, WorldSpec
from tests.ray.echo import Echo
from tests.unit.controller.ray_pretended import Actor, Pretended, pretending, raised

TIMEOUT_S = 10.0
NODES = (("a", 9), ("a", 9), ("b", 1), ("b", 1), ("b", 1))
"""Of each device: its node, and the cores that it may use there."""


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """The controller stands on node a."""
    context = SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    with pretending() as found:
        yield found


def device(there: Pretended, node: tuple[str, int], *, joined: object = None, made_s: float = 0.0) -> Actor:
    return Actor(
        node_cores=lambda: there.ref(node),
        address=lambda: there.ref("10.0.0.1:5"),
        join=lambda *_: there.ref(joined, made_s=made_s),
        host=lambda *_: there.ref(None),
    )


def of(*devices: Actor) -> RayCluster:
    found = RayCluster(None, timeout_s=TIMEOUT_S)
    found.actors = [device.handle for device in devices]
    return found


@pytest.mark.parametrize("offload", [False, True])
def test_devices_share_the_cores_of_their_node(there: Pretended, *, offload: bool) -> None:
    devices = [device(there, node) for node in NODES]
    job = of(*devices)
    job.prepare({}, [(0, 1), (0, 1), (2, 3)], offload=offload)
    world = WorldSpec(5, "10.0.0.1:5", ((0, 1), (2, 3)), TIMEOUT_S)
    assert [each.join.calls for each in devices] == [[(world, threads)] for threads in (4, 4, 1, 1, 1)]
    assert [each.join.named for each in devices] == [{"offload": offload}] * 5


@pytest.mark.parametrize(("nodes", "spans"), [("aa", False), ("ab", True), ("bb", True)])
def test_the_controllers_node_counts_too(there: Pretended, nodes: str, *, spans: bool) -> None:
    job = of(*(device(there, (node, 1)) for node in nodes))
    job.prepare({}, [])
    assert job.spans_nodes is spans


def test_roles_are_built_on_their_own_devices(there: Pretended) -> None:
    devices = [device(there, node) for node in NODES[:3]]
    placements = {
        name: Placement(Echo(), ParallelLayout(d=len(ranks)), ranks, None)
        for name, ranks in {"actor": (0, 1), "critic": (1, 2)}.items()
    }
    of(*devices).prepare(placements, [])
    assert [[name for name, _ in each.host.calls] for each in devices] == [
        ["actor"],
        ["actor", "critic"],
        ["critic"],
    ]


def test_who_does_not_join_in_time_is_named(there: Pretended) -> None:
    devices = [device(there, NODES[0], made_s=made_s) for made_s in (1.0, *[99.0] * 5)]
    names = ", ".join(f"device {number} to join the world" for number in range(1, 5))
    with pytest.raises(WorkerTimeoutError, match=rf"^waited 10 s for {names}\.$"):
        of(*devices).prepare({}, [])


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (raised(ConnectionError("reset")), ActorDiedError(), "device 1 to join the world: its process died."),
        (None, raised(WorkerError("actor[rank 1].build: no")), r"actor\[rank 1\]\.build: no$"),
    ],
)
def test_who_dies_or_fails_as_it_joins_is_named(
    there: Pretended, first: object, second: object, said: str
) -> None:
    with pytest.raises(WorkerError, match=f"^{said}"):
        of(*(device(there, NODES[0], joined=joined) for joined in (first, second))).prepare({}, [])


@pytest.mark.parametrize(
    ("up", "address", "ended"),
    [
        (True, None, ["kill", "kill", "remove"]),
        (False, None, ["kill", "kill", "shutdown"]),
        (False, "10.0.0.1:6379", ["kill", "kill", "remove", "shutdown"]),
    ],
    ids=["a-session's", "its-own", "a-cluster's"],
)
def test_what_a_job_has_started_ends_with_it(
    there: Pretended, monkeypatch: pytest.MonkeyPatch, *, up: bool, address: str | None, ended: list[str]
) -> None:
    told, running = list[str](), {0} if up else set()

    def shutdown() -> None:
        told.append("shutdown")
        running.clear()

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("start_ray", "join"):
        monkeypatch.setattr(cluster, name, lambda _: running.add(0))
    monkeypatch.setattr(cluster, "check_address", lambda _: None)
    monkeypatch.setattr(cluster, "remove_placement_group", lambda _: told.append("remove"))
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(running))
    monkeypatch.setattr(ray, "kill", lambda *_, **__: told.append("kill"))
    monkeypatch.setattr(ray, "shutdown", shutdown)
    job = RayCluster(address, timeout_s=TIMEOUT_S)
    job.connect(2)
    job.actors = [device(there, node).handle for node in NODES[:2]]
    job._groups = [object()]  # type: ignore[list-item]
    for _ in range(2):
        job.close()
        assert told == ended
