"""Devices out of a Ray cluster: found or started, one placement group a pool, one actor a device."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
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

from rlhf_lightning.controller.connection import (
    LOCAL,
    OPTION,
    TERMINATED,
    check_address,
    check_connected,
    check_limit,
    check_sockets,
    join,
    start_ray,
)
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.controller.device_actor import DeviceActor
from rlhf_lightning.controller.errors import WorkerError, WorkerTimeoutError
from rlhf_lightning.controller.failure import first_death
from rlhf_lightning.controller.import_path import ImportPath
from rlhf_lightning.controller.ray_types import DeviceHandle, Ref
from rlhf_lightning.controller.resource_pool import ResourcePool
from rlhf_lightning.controller.room import BUNDLES, check_room, fits_a_node, held, too_few
from rlhf_lightning.cores import usable_cores
from rlhf_lightning.parallel import WorldSpec

RESERVE_S = 60.0
"""Longest wait for devices that the cluster has, but other jobs hold."""
_WAIT_S = 1.0
"""How long Ray is to wait for them at a time: meanwhile it hears no signal, such as Ctrl-C."""
TOLD_S = 60.0
"""After so long the user is told which devices have not started, joined or loaded their models."""
NAMED = 4
"""Most of them, or nodes, that a message names."""
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""What torchrun, srun and mpirun number their processes by."""


logger = logging.getLogger(__name__)


def check_alone() -> None:
    """Refuse to be one of several processes of a launcher: each would be a controller of its own.

    The first of them goes on: it may be what `ray symmetric-run` has started on the first node.
    """
    for name in _RANKS:
        rank = os.environ.get(name, "0")
        if rank != "0":
            raise ValueError(
                f"{name}={rank}: this is one of several processes that a launcher started, and each would be "
                "a controller with devices of its own. Start one, without torchrun or srun; docs/cluster.md "
                "has a script for Slurm."
            )


class RayCluster:
    """The Ray side of one job: connects, starts the devices, and ends what it started."""

    def __init__(self, address: str | None, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.actors: list[DeviceHandle] = []
        self.hosts: list[str] = []
        """Host name of each device's node."""
        self.labels: list[str] = []
        """What errors call each device; with its node where they are on several."""
        self.spans_nodes = False
        given = address or os.environ.get("RAY_ADDRESS") or LOCAL
        self._address = None if given == LOCAL else given
        self._origin = OPTION if address else "RAY_ADDRESS"
        self._groups: list[PlacementGroup] = []
        self._started_ray = False

    @property
    def is_elsewhere(self) -> bool:
        """Whether the cluster is one that runs already."""
        return self._address is not None

    def check(self, needed: int) -> None:
        """Refuse an address at which nothing answers, or more devices than there are; without connecting.

        Raises:
            ValueError: no cluster answers there, this process is connected to another, the one that it is
                connected to has fewer, or this machine has GPUs, but fewer, or no room for Ray's sockets or
                its object store.
        """
        if ray.is_initialized():
            if self._address is not None and self._origin == OPTION and not self._started_ray:
                check_connected(self._address)
            check_room(needed, _kind())
            return
        if self._address is not None:
            check_address(self._address, self._origin)
            return
        check_sockets()
        check_limit()
        if 0 < torch.cuda.device_count() < needed:
            raise ValueError(too_few(needed, torch.cuda.device_count(), "GPU"))

    def connect(self, needed: int) -> None:
        """Connect, or start Ray on this machine with room for the devices; nothing where Ray is up already.

        Raises:
            ValueError: no cluster answers at the address, this process is connected to another, or to one
                with fewer devices.
        """
        logging.getLogger("ray._private.worker").addFilter(_is_untold)
        # It warns of a store for which /dev/shm has no room, and of several clusters where one is sought.
        logging.getLogger("ray._private.services").setLevel(logging.WARNING)
        self.check(needed)
        if ray.is_initialized():
            return
        if self._address is None:
            start_ray(max(needed, usable_cores()))
        else:
            join(self._address, self._origin)
        self._started_ray = True

    def start(self, pools: Sequence[ResourcePool]) -> None:
        """Make one actor for each device of each pool.

        Raises:
            ValueError: `connect` raises it.
            WorkerTimeoutError: other jobs hold the devices.
        """
        needed = num_devices(pools)
        self.connect(needed)
        kind = _kind()
        # The largest first: small ones before it may take a part of each node, and it would lie in two.
        groups: dict[ResourcePool, PlacementGroup] = {}
        for pool in sorted(pools, key=lambda pool: -pool.num_devices):
            groups[pool] = self._reserve(pool, kind, ours=num_devices([*groups]))
        for pool in pools:
            self._open(groups[pool], kind)
        several = len(set(self.hosts)) > 1
        self.labels = [f"device {i}" + f" on {host}" * several for i, host in enumerate(self.hosts)]

    def _reserve(self, pool: ResourcePool, kind: str, *, ours: int) -> PlacementGroup:
        """Reserve a pool's devices, on one node if it has room for all; `ours` are reserved already."""
        # PACK alone begins with the node that has most left, counting its CPUs, and takes the rest elsewhere.
        strategy = "STRICT_PACK" if fits_a_node(pool.num_devices, kind) else "PACK"
        group: PlacementGroup = placement_group([BUNDLES[kind]] * pool.num_devices, strategy=strategy)
        self._groups.append(group)
        if not self._has(group, pool):
            raise WorkerTimeoutError(held(pool.name, pool.num_devices, kind, started=ours))
        return group

    def _open(self, group: PlacementGroup, kind: str) -> None:
        """Start the actors of a pool's devices, node by node.

        The node with the most comes first, so that groups of neighbours stay inside nodes of which others
        have a part; then names decide, as those of neighbours in a rack are often alike.
        """
        nodes: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
        hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
        counts = Counter(nodes.values())
        actor = ray.remote(DeviceActor)
        for index in sorted(nodes, key=lambda i: (-counts[nodes[i]], hosts.get(nodes[i], ""), nodes[i], i)):
            where = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            )
            # Calls report to the controller; a second record, for the dashboard, costs a tenth of a ping.
            options = {"num_cpus": 1, "num_gpus": 1 if kind == "GPU" else 0, "enable_task_events": False}
            handle = actor.options(scheduling_strategy=where, max_restarts=0, **options).remote(
                len(self.actors), gpu=kind == "GPU", path=ImportPath.of_controller()
            )
            self.actors.append(cast(DeviceHandle, handle))
            self.hosts.append(hosts.get(nodes[index], nodes[index]))

    def _has(self, group: PlacementGroup, pool: ResourcePool) -> bool:
        """Wait for a pool's devices; whether there are enough that no other job holds."""
        waits = math.ceil(min(self.timeout_s, RESERVE_S) / _WAIT_S)
        try:
            return any(group.wait(_WAIT_S) for _ in range(waits))
        except Exception as err:  # Ray has no narrower one for a group that it has lost
            raise WorkerError(
                f"pool {pool.name}: the cluster went away while its devices were reserved ({err}). Look "
                "whether its head is up. `auto` may have found the Ray that another job started for itself: "
                "give host:port, such as --strategy.address 10.0.0.1:6379."
            ) from err

    def prepare(
        self,
        placements: Mapping[str, Placement],
        groups: Sequence[tuple[int, ...]],
        *,
        offload: bool = False,
        saved_in: Iterable[Path] = (),
    ) -> None:
        """Join the devices into one world and build every role on them.

        Args:
            placements: of the roles, by name.
            groups: global ranks of the process groups that they need.
            offload: make room for the role that computes.
            saved_in: directories of checkpoints, which all nodes have to see.

        Raises:
            ValueError: a node does not see a directory.
            WorkerError: a role could not be built.
            WorkerTimeoutError: it took longer than `timeout_s`.
        """
        started = {
            f"{label} to start": actor.node_cores.remote()
            for label, actor in zip(self.labels, self.actors, strict=True)
        }
        found = cast(list[tuple[str, int]], self._get(started))
        for directory in saved_in:
            self._check_shared(directory)
        nodes = [node for node, _ in found]
        self.spans_nodes = len({*nodes, ray.get_runtime_context().get_node_id()}) > 1
        address = self._get({"the address of device 0": self.actors[0].address.remote()})[0]
        made, links = dict.fromkeys(groups), {p.link: None for p in placements.values() if p.link}
        several = len(set(nodes)) > 1
        spec = WorldSpec(
            len(self.actors), str(address), tuple(made), self.timeout_s, tuple(links), spans_nodes=several
        )
        threads = [max(1, cores // nodes.count(node)) for node, cores in found]
        joined = {
            f"{label} to join the world": actor.join.remote(spec, num_threads, offload=offload)
            for label, actor, num_threads in zip(self.labels, self.actors, threads, strict=True)
        }
        self._get(joined)
        built = {}
        for name, placement in placements.items():
            for rank, device in enumerate(placement.devices):
                call = f"{name}[rank {rank}, {self.labels[device]}].build"
                built[call] = self.actors[device].host.remote(name, placement)
        self._get(built)

    def _check_shared(self, directory: Path) -> None:
        """Refuse a directory that a node does not see; what is tried is what exists of its path.

        A fresh directory tells: one of the same path may be on each node's own disk.
        """
        others = dict(zip(self.hosts, self.actors, strict=True))
        others.pop(socket.gethostname(), None)
        if not others:
            return
        above = next(path for path in (directory, *directory.parents) if path.exists())
        with TemporaryDirectory(prefix=".seen-", dir=above) as fresh:
            asked = {f"{host} to look for {fresh}": each.sees.remote(fresh) for host, each in others.items()}
            seen = dict(zip(others, self._get(asked), strict=True))
        if blind := [host for host in others if not seen[host]]:
            raise ValueError(
                f"{directory}: checkpoints go there, and a new directory in {above} is not there on "
                f"{', '.join(blind[:NAMED])}. They need a disk that all nodes share: try "
                "--trainer.default_root_dir, or the directory of their callback, on one."
            )

    def _get(self, calls: Mapping[str, Ref]) -> list[object]:
        """Wait for calls, given under the words by which errors name them."""
        refs = list(calls.values())
        try:
            with suppress(GetTimeoutError):
                return list(ray.get(refs, timeout=min(TOLD_S, self.timeout_s)))
            if self.timeout_s > TOLD_S:
                logger.warning("Waiting for %s.", _late(calls))
            return list(ray.get(refs, timeout=max(0.0, self.timeout_s - TOLD_S)))
        except GetTimeoutError as err:
            raise WorkerTimeoutError(f"waited {self.timeout_s:.0f} s for {_late(calls)}.") from err
        except RayError as err:
            death = first_death(list(calls.items()))
            if death is None and isinstance(err, RayTaskError):
                raise WorkerError(str(err.cause)) from None
            raise WorkerError(death or f"waiting for {next(iter(calls))}: its process died. {err}") from None

    def close(self) -> None:
        """End the actors, give the devices back, and stop Ray where this job started it."""
        if ray.is_initialized():
            if TERMINATED.is_set() and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would break this off
            for actor in self.actors:
                ray.kill(cast(ActorHandle[DeviceActor], actor), no_restart=True)
            # A Ray of the job's own ends with its groups, and may be dead: removing them would wait for it.
            if self.is_elsewhere or not self._started_ray:
                for group in self._groups:
                    remove_placement_group(group)
            if self._started_ray:
                ray.shutdown()
        self.actors.clear()
        self._groups.clear()
        self.hosts.clear()
        self.labels.clear()


def _late(calls: Mapping[str, Ref]) -> str:
    """The calls that have not ended, in words."""
    late = [name for name, ref in calls.items() if not ray.wait([ref], timeout=0)[0]]
    return ", ".join(late[:NAMED]) + f" and {len(late) - NAMED} more" * (len(late) > NAMED)


def _is_untold(record: logging.LogRecord) -> bool:
    """Leave out the errors of calls whose results nobody reads: the transport raises them all."""
    return not record.getMessage().startswith("Unhandled error")


def num_devices(pools: Sequence[ResourcePool]) -> int:
    """Of all pools together."""
    return sum(pool.num_devices for pool in pools)


def _kind() -> str:
    """What each device computes on."""
    return "GPU" if num_gpus() else "CPU"


def num_gpus() -> int:
    """GPUs of the cluster that is connected, else of this machine."""
    return int(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else torch.cuda.device_count()
