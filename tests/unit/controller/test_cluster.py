"""What devices are told as they start, how those that do not are named, and what is ended afterwards."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private import state
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_lightning.controller import ResourcePool, WorkerError, WorkerTimeoutError, cluster
from rlhf_lightning.controller.cluster import RayCluster
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.controller.import_path import ImportPath
from rlhf_lightning.controller.ray_types import Ref
from rlhf_lightning.parallel import ParallelLayout, WorldSpec
from tests.ray.echo import Echo
from tests.unit.controller.ray_pretended import Actor, Method, Pretended, pretending, raised

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
    found.labels = [f"device {rank}" for rank in range(len(devices))]
    return found


@pytest.mark.parametrize(
    ("kind", "names", "order"),
    [
        ("CPU", {"a": "two", "b": "three", "c": "one"}, [0, 2, 3, 1]),
        ("GPU", {"a": "one", "b": "one", "c": "one"}, [0, 2, 1, 3]),  # three of Ray's nodes on one host
    ],
)
def test_actors_start_node_by_node(
    there: Pretended, monkeypatch: pytest.MonkeyPatch, kind: str, names: dict[str, str], order: list[int]
) -> None:
    """The node with the most devices comes first: groups of 2 would lie in two nodes if it were another."""
    asked, waits, started = list[object](), list[float](), list[object]()

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return True

    def group(bundles: list[dict[str, float]], *, strategy: str) -> SimpleNamespace:
        asked.extend([*bundles, strategy])
        return SimpleNamespace(wait=wait, is_empty=False)

    def options(*, scheduling_strategy: PlacementGroupSchedulingStrategy, **given: object) -> SimpleNamespace:
        def remote(rank: int, *, gpu: bool, path: ImportPath) -> int:
            assert path == ImportPath.of_controller()
            started.append((rank, scheduling_strategy.placement_group_bundle_index, gpu, given))
            return rank

        return SimpleNamespace(remote=remote)

    monkeypatch.setattr(cluster, "num_gpus", lambda: 4 * (kind == "GPU"))
    monkeypatch.setattr(cluster, "placement_group", group)
    nodes = {0: "b", 1: "a", 2: "b", 3: "c"}
    monkeypatch.setattr(cluster, "placement_group_table", lambda _: {"bundles_to_node_id": nodes})
    monkeypatch.setattr(ray, "cluster_resources", lambda: {kind: 4})
    monkeypatch.setattr(ray, "remote", lambda _: SimpleNamespace(options=options))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    job = RayCluster(None, timeout_s=1000 * TIMEOUT_S)
    has = {"Alive": True, "Resources": {"CPU": 2.0, "GPU": 2.0}}
    hosts = [{"NodeID": node, "NodeManagerHostname": host} | has for node, host in names.items()]
    monkeypatch.setattr(ray, "nodes", lambda: hosts)
    monkeypatch.setattr(state, "available_resources_per_node", lambda: {"a": {"CPU": 9.0, "GPU": 3.0}})
    job.start([ResourcePool("main", 4, ())])
    gpu = kind == "GPU"
    assert asked == [{"CPU": 1.0, "GPU": 1.0} if gpu else {"CPU": 1.0}] * 4 + [
        "PACK" if gpu else "STRICT_PACK"
    ]
    assert waits == [1.0]
    assert job.hosts == [names[nodes[index]] for index in order]
    several = len({*names.values()}) > 1
    assert job.labels == [f"device {i}" + f" on {host}" * several for i, host in enumerate(job.hosts)]
    each = {"num_cpus": 1, "num_gpus": int(gpu), "enable_task_events": False, "max_restarts": 0}
    assert started == [(rank, index, gpu, each) for rank, index in enumerate(order)]


def test_the_largest_pool_is_reserved_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else small ones may leave it a part of each node; devices are numbered in the order of the pools.

    One that fits a node is to lie in one.
    """
    reserved, started = list[tuple[int, str]](), list[tuple[int, int]]()

    def group(bundles: list[dict[str, float]], *, strategy: str) -> SimpleNamespace:
        reserved.append((len(bundles), strategy))
        return SimpleNamespace(wait=lambda _: True, is_empty=False, size=len(bundles), strategy=strategy)

    def options(*, scheduling_strategy: PlacementGroupSchedulingStrategy, **_: object) -> SimpleNamespace:
        size = scheduling_strategy.placement_group.size  # type: ignore[attr-defined]
        return SimpleNamespace(remote=lambda rank, *, gpu, path: started.append((rank, size)))

    monkeypatch.setattr(cluster, "num_gpus", lambda: 0)
    monkeypatch.setattr(cluster, "placement_group", group)
    monkeypatch.setattr(
        cluster,
        "placement_group_table",
        lambda found: {"bundles_to_node_id": dict.fromkeys(range(found.size), "a")},
    )
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 6})
    monkeypatch.setattr(ray, "remote", lambda _: SimpleNamespace(options=options))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(state, "available_resources_per_node", lambda: {"a": {"CPU": 2.0}, "b": {"CPU": 2.0}})
    job = RayCluster(None, timeout_s=TIMEOUT_S)
    job.start([ResourcePool(str(size), size, ()) for size in (1, 3, 2)])
    assert reserved == [(3, "PACK"), (2, "STRICT_PACK"), (1, "STRICT_PACK")]
    assert started == [(0, 1), *((rank, 3) for rank in (1, 2, 3)), (4, 2), (5, 2)]


def test_an_interrupt_is_heard_while_others_hold_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hears none as long as it waits, so it is asked to wait again and again."""
    waits = list[float]()

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return False

    monkeypatch.setattr(cluster, "placement_group", lambda *_, **__: SimpleNamespace(wait=wait))
    monkeypatch.setattr(cluster, "num_gpus", lambda: 0)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 3})
    monkeypatch.setattr(state, "available_resources_per_node", lambda: {"a": {"CPU": 1.0}})
    for timeout_s, total_s in ((1000.0, cluster.RESERVE_S), (2.5, 3.0)):
        waits.clear()
        with pytest.raises(
            WorkerTimeoutError, match=r"other jobs .* leave 1 CPUs\. Try --strategy\.devices 1 \("
        ):
            RayCluster(None, timeout_s=timeout_s).start([ResourcePool("main", 3, ())])
        assert (sum(waits), max(waits)) == (total_s, 1.0)


@pytest.mark.parametrize("offload", [False, True])
def test_devices_share_the_cores_of_their_node(there: Pretended, *, offload: bool) -> None:
    devices = [device(there, node) for node in NODES]
    job = of(*devices)
    job.prepare({}, [(0, 1), (0, 1), (2, 3)], offload=offload)
    world = WorldSpec(5, "10.0.0.1:5", ((0, 1), (2, 3)), TIMEOUT_S, spans_nodes=True)
    assert [each.join.calls for each in devices] == [[(world, threads)] for threads in (4, 4, 1, 1, 1)]
    assert [each.join.named for each in devices] == [{"offload": offload}] * 5


def test_devices_are_told_which_groups_are_links(there: Pretended) -> None:
    devices, link = [device(there, node) for node in NODES[:3]], (0, 2)
    ends = {"actor": (0, 1), "generator": (2,)}
    placements = {
        name: Placement(Echo(), ParallelLayout(d=len(ranks)), ranks, None, link)
        for name, ranks in ends.items()
    }
    placements["reward"] = Placement(Echo(), ParallelLayout(), (1,), None)
    of(*devices).prepare(placements, [(0, 1), link, link])
    world = WorldSpec(3, "10.0.0.1:5", ((0, 1), link), TIMEOUT_S, links=(link,), spans_nodes=True)
    assert [each.join.calls[0][0] for each in devices] == [world] * 3


@pytest.mark.parametrize(
    ("nodes", "spans", "apart"), [("aa", False, False), ("ab", True, True), ("bb", True, False)]
)
def test_the_controllers_node_counts_too(there: Pretended, nodes: str, *, spans: bool, apart: bool) -> None:
    devices = [device(there, (node, 1)) for node in nodes]
    job = of(*devices)
    job.prepare({}, [])
    assert job.spans_nodes is spans
    [(world, _)] = devices[0].join.calls
    assert isinstance(world, WorldSpec)
    assert world.spans_nodes is apart, "its world is of the devices alone"


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


@pytest.mark.parametrize("blind", [(), ("b",), ("b", "c")])
def test_a_disk_of_checkpoints_that_nodes_do_not_share_is_refused(
    there: Pretended, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, blind: tuple[str, ...]
) -> None:
    """Before models are loaded; one device of each other node looks for a directory that is new."""
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    looked = list[tuple[str, Path]]()

    def looking(host: str) -> Actor:
        def sees(directory: str) -> Ref:
            looked.append((host, Path(directory)))
            assert Path(directory).is_dir()
            return there.ref(host not in blind)

        found = device(there, (host, 1))
        found.methods["sees"] = Method(sees)
        return found

    hosts = ["a", "a", "b", "b", "c"]
    devices = [looking(host) for host in hosts]
    job, directory = of(*devices), tmp_path / "runs" / "checkpoints"
    job.hosts = hosts
    wrong = rf"^{directory}: checkpoints .* in {tmp_path} is not there on {', '.join(blind)}\. .*default_root"
    with pytest.raises(ValueError, match=wrong) if blind else nullcontext():
        job.prepare({}, [], saved_in=[directory])
    assert [host for host, _ in looked] == ["b", "c"]
    assert {fresh.parent for _, fresh in looked} == {tmp_path}
    assert [*tmp_path.iterdir()] == []
    assert len(devices[0].join.calls) == (not blind)


def test_who_does_not_join_in_time_is_named(there: Pretended, caplog: pytest.LogCaptureFixture) -> None:
    devices = [device(there, NODES[0], made_s=made_s) for made_s in (1.0, *[99.0] * 5)]
    names = ", ".join(f"device {number} to join the world" for number in range(1, 5))
    with pytest.raises(WorkerTimeoutError, match=rf"^waited 10 s for {names} and 1 more\.$"):
        of(*devices).prepare({}, [])
    assert not caplog.records, "the error says it"


@pytest.mark.parametrize(("made_s", "told"), [(59.0, False), (61.0, True), (299.0, True), (301.0, True)])
def test_who_is_late_is_told_after_a_minute(
    there: Pretended, caplog: pytest.LogCaptureFixture, *, made_s: float, told: bool
) -> None:
    """Half an hour, in which a node cannot start its devices or is not reached, passed in silence."""
    job = of(device(there, NODES[0]), device(there, NODES[0], made_s=made_s))
    job.timeout_s = 300.0
    wrong = pytest.raises(WorkerTimeoutError, match=r"^waited 300 s for device 1 to join the world\.$")
    with wrong if made_s > job.timeout_s else nullcontext():
        job.prepare({}, [])
    said = [record.getMessage() for record in caplog.records]
    assert said == ["Waiting for device 1 to join the world."] * told
    assert there.now == min(made_s, job.timeout_s)


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
        monkeypatch.setattr(cluster, name, lambda *_: running.add(0))
    monkeypatch.setattr(cluster, "check_address", lambda *_: None)
    monkeypatch.setattr(cluster, "remove_placement_group", lambda _: told.append("remove"))
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(running))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2})
    monkeypatch.setattr(ray, "kill", lambda *_, **__: told.append("kill"))
    monkeypatch.setattr(ray, "shutdown", shutdown)
    job = RayCluster(address, timeout_s=TIMEOUT_S)
    job.connect(2)
    job.actors = [device(there, node).handle for node in NODES[:2]]
    job.hosts, job.labels = ["one", "one"], ["device 0", "device 1"]
    job._groups = [object()]  # type: ignore[list-item]
    for _ in range(2):
        job.close()
        assert told == ended
        assert (job.actors, job.hosts, job.labels) == ([], [], [])


def test_a_second_sigterm_does_not_break_off_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a wrapper passes on what the whole group is sent."""
    monkeypatch.setattr(cluster, "TERMINATED", asked := threading.Event())
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    heeds, theirs = list[object](), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "shutdown", lambda: heeds.append(signal.getsignal(signal.SIGTERM)))
    job = of()
    job._started_ray = True
    try:
        job.close()
        asked.set()
        job.close()
    finally:
        signal.signal(signal.SIGTERM, theirs)
    assert heeds == [theirs, signal.SIG_IGN]
