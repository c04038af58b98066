"""Devices out of a Ray cluster: found or started, one placement group a pool, one actor a device."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_lightning.controller.block import Block
from rlhf_lightning.controller.call import Call, CallReport
from rlhf_lightning.controller.device import Device, Placement
from rlhf_lightning.controller.errors import WorkerError, WorkerTimeoutError
from rlhf_lightning.controller.ray_types import DeviceHandle, Ref
from rlhf_lightning.parallel import WorldSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResourcePool:
    """Devices that the roles placed on them share (HybridFlow section 4.2); pools never share a device."""

    name: str
    num_devices: int
    roles: tuple[str, ...]


class DeviceActor(Device):
    """A Device as a Ray actor."""

    def address(self) -> str:
        """host:port of a port that is free on this node."""
        with socket.socket() as sock:
            sock.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{sock.getsockname()[1]}"

    def submit(self, call: Call, *blocks: Block) -> CallReport | Block | tuple[CallReport | Block, ...]:
        """Run a call; Ray wants one result bare and several as a tuple."""
        results = self.call(call, *blocks)
        return results if call.returns else results[0]

    def node_id(self) -> str:
        """Ray's name of the node."""
        return str(ray.get_runtime_context().get_node_id())


def check_address(address: str) -> None:
    """Refuse an address at which nothing answers, in seconds rather than minutes.

    Raises:
        ValueError: the address is not `auto` or host:port, or nothing listens there.
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or address.startswith("ray://"):
        raise ValueError(
            f"strategy.address={address!r}: write host:port of the cluster's head, such as 10.0.0.1:6379."
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as err:
        raise ValueError(
            f"strategy.address={address!r}: no Ray cluster answers there ({err}). Start one with "
            "`ray start --head`, or leave the address out to use this machine."
        ) from err


class RayCluster:
    """The Ray side of one job: connects, starts the devices, and ends what it started."""

    def __init__(self, address: str | None, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.actors: list[DeviceHandle] = []
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._groups: list[PlacementGroup] = []
        self._started_ray = False

    def start(self, pools: Sequence[ResourcePool]) -> None:
        """Connect, or start Ray on this machine, and make one actor for each device of each pool.

        Raises:
            ValueError: the cluster has fewer devices than the pools ask for.
            WorkerTimeoutError: devices did not come up in time.
        """
        needed = sum(pool.num_devices for pool in pools)
        self._connect(needed)
        kind = "GPU" if ray.cluster_resources().get("GPU", 0) > 0 else "CPU"
        has = int(ray.cluster_resources().get(kind, 0))
        if has < needed:
            wanted = ", ".join(f"{pool.name} {pool.num_devices}" for pool in pools)
            raise ValueError(
                f"the pools need {needed} devices ({wanted}), and the Ray cluster has {has} {kind}s."
            )
        for pool in pools:
            self._open(pool, kind)

    def _connect(self, needed: int) -> None:
        if ray.is_initialized():
            return
        if self._address is not None:
            check_address(self._address)
            ray.init(address=self._address, logging_level=logging.ERROR, log_to_driver=True)
        else:
            cpus = max(needed, os.cpu_count() or 1)
            ray.init(num_cpus=cpus, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=True)
        self._started_ray = True

    def _open(self, pool: ResourcePool, kind: str) -> None:
        """Reserve a pool's devices, filling nodes before spreading, and start their actors in node order."""
        bundle = {"CPU": 1.0, "GPU": 1.0} if kind == "GPU" else {"CPU": 1.0}
        group = placement_group([bundle] * pool.num_devices, strategy="PACK")
        self._groups.append(group)
        try:
            ray.get(group.ready(), timeout=self.timeout_s)
        except GetTimeoutError as err:
            free = ray.available_resources().get(kind, 0)
            raise WorkerTimeoutError(
                f"pool {pool.name} waits for {pool.num_devices} {kind}s and {free:.0f} are free."
            ) from err
        nodes: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
        actor = ray.remote(DeviceActor)
        for index in sorted(nodes, key=lambda i: (nodes[i], i)):
            where = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            )
            options = {"num_cpus": 1, "num_gpus": 1 if kind == "GPU" else 0, "max_restarts": 0}
            handle = actor.options(scheduling_strategy=where, **options).remote(len(self.actors))
            self.actors.append(cast(DeviceHandle, handle))

    def prepare(
        self, placements: Mapping[str, Placement], groups: Sequence[tuple[int, ...]], *, offload: bool = False
    ) -> None:
        """Join the devices into one world and build every role on them.

        Raises:
            WorkerError: a role could not be built.
            WorkerTimeoutError: it took longer than `timeout_s`.
        """
        nodes = self._get([actor.node_id.remote() for actor in self.actors], "devices to start")
        address = self._get([self.actors[0].address.remote()], "the address of device 0")[0]
        spec = WorldSpec(len(self.actors), str(address), tuple(dict.fromkeys(groups)), self.timeout_s)
        cores = os.cpu_count() or 1
        threads = [max(1, cores // nodes.count(node)) for node in nodes]
        joined = [a.join.remote(spec, n, offload=offload) for a, n in zip(self.actors, threads, strict=True)]
        self._get(joined, "devices to join the world")
        hosted = [
            self.actors[device].host.remote(name, placement)
            for name, placement in placements.items()
            for device in placement.devices
        ]
        self._get(hosted, "models to load")

    def _get(self, refs: Sequence[Ref], what: str) -> list[object]:
        try:
            return list(ray.get(list(refs), timeout=self.timeout_s))
        except GetTimeoutError as err:
            raise WorkerTimeoutError(f"waited {self.timeout_s:.0f} s for {what}.") from err
        except RayTaskError as err:
            raise WorkerError(str(err.cause)) from None
        except RayError as err:
            raise WorkerError(f"while waiting for {what}: {err}") from err

    def close(self) -> None:
        """End the actors, give the devices back, and stop Ray where this job started it."""
        if ray.is_initialized():
            for actor in self.actors:
                ray.kill(cast(ActorHandle[DeviceActor], actor), no_restart=True)
            for group in self._groups:
                remove_placement_group(group)
            if self._started_ray:
                ray.shutdown()
        self.actors.clear()
        self._groups.clear()


def num_local_gpus() -> int:
    """GPUs of this machine."""
    return torch.cuda.device_count()
