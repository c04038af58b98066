"""What a device sees that Ray has started, and what is left of one that closes."""

from __future__ import annotations

import gc
import os
import resource
import socket
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from urllib.parse import urlsplit

import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from rlhf_lightning.controller import WorkerError
from rlhf_lightning.controller.device import Device, Placement, allow_files
from rlhf_lightning.controller.device_actor import DeviceActor
from rlhf_lightning.parallel import ParallelLayout, WorldSpec
from tests.ray.echo import Echo
from tests.unit import spmd


@pytest.fixture(autouse=True)
def _looks_for_garbage() -> Iterator[None]:
    """A device disables them until it has a role."""
    yield
    gc.enable()


@pytest.mark.parametrize(("told", "seen"), [("1", "5"), ("true", "5"), ("0", "0,1"), (None, "0,1")])
def test_a_device_sees_its_own_gpu_alone(
    told: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", raising=False)
    if told is not None:
        monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", told)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [5])
    DeviceActor(0, gpu=True)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_a_device_that_computes_on_a_cpu_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # Ray leaves it so where an actor asks for no GPU
    DeviceActor(0, gpu=False)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_looked_for_once_a_role_is_there(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """Not among modules, and not before: the looks at them would take a quarter of their imports."""
    seen, built = list[tuple[bool, int]](), list[list[object]]()

    def build(*_: object) -> None:
        seen.append((gc.isenabled(), gc.get_freeze_count()))
        built.extend([] for _ in range(1000))
        if fails:
            raise MemoryError

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(Device, "host", build)
    device, placement = DeviceActor(0, gpu=False), Placement(Echo(), ParallelLayout(), (0,), None)
    assert not gc.isenabled()
    mine = [object()]
    for name in ("first", "second"):
        with pytest.raises(MemoryError) if fails else nullcontext():
            device.host(name, placement)
    assert [enabled for enabled, _ in seen] == [False, True]
    first, second = (frozen for _, frozen in seen)
    assert second == pytest.approx(first, abs=50), "what roles are built of is garbage one day"
    assert all(found is not mine for found in gc.get_objects())


def test_a_gpu_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = r"^device 3 on node \S+: Ray counts a GPU there, and PyTorch \S+ cannot use it\. Install .*gpus 0"
    with pytest.raises(WorkerError, match=said):
        Device(3, gpu=True).join(WorldSpec(1, "", (), 60.0), 1)


def test_a_device_that_closes_lets_its_roles_go_and_leaves_the_world() -> None:
    device = Device(0)
    device.join(WorldSpec(1, "", ((0,),), 60.0), torch.get_num_threads())
    assert dist.is_initialized()
    role = Echo()
    device.host("echo", Placement(role, ParallelLayout(), (0,), None))
    vars(role)["itself"] = role  # as a role and its engine know each other
    left = weakref.ref(role)
    del role
    device.close()
    assert left() is None
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("address", "spans", "given", "taken"),
    [
        ("127.0.0.1", True, None, "lo"),
        ("127.0.0.1", True, "ib0", "ib0"),
        ("127.0.0.1", False, None, None),
        ("192.0.2.1", True, None, None),  # of documentation: no interface has it
    ],
)
def test_gloo_takes_the_interface_by_which_ray_reaches_the_node(
    monkeypatch: pytest.MonkeyPatch, address: str, *, spans: bool, given: str | None, taken: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")
    if given is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    spec = WorldSpec(1, "", (), 60.0, spans_nodes=spans)
    DeviceActor(0, gpu=False).join(spec, torch.get_num_threads())
    assert os.environ.get("GLOO_SOCKET_IFNAME") == taken


@pytest.mark.parametrize("ip", ["10.0.0.1", "2001:db8::1"])
def test_the_address_of_a_device_has_its_host_and_port_apart(
    monkeypatch: pytest.MonkeyPatch, ip: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: ip)
    found = urlsplit(f"tcp://{DeviceActor(0, gpu=False).address()}")
    assert (found.hostname, bool(found.port)) == (ip, True)


def test_nobody_takes_the_port_of_the_store_before_the_devices_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    device = DeviceActor(0, gpu=False)
    address = device.address()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("", urlsplit(f"tcp://{address}").port or 0))
    store, rank, size = next(rendezvous(f"tcp://{address}", rank=0, world_size=1))
    store.set("said", "here")
    assert (device.store.get("said"), rank, size) == (b"here", 0, 1)


def limits(group: dist.ProcessGroup) -> tuple[tuple[int, int], ...]:
    """Of a process that was allowed 256 open files, once it has joined a world; then once told of less."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    Device(group.rank(), gpu=False).join(WorldSpec(1, "", (), 60.0), 1)
    joined = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_files(most=300)
    return joined, resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_device_may_be_connected_to_a_thousand_others() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    [(joined, later)] = spmd.run(1, limits)
    assert joined == (min(hard, 65536), hard)
    assert later == joined, "what is allowed already stays"
