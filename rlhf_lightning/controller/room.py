"""What the nodes of a cluster have room for, what to type where that is too little, and their GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import ray
from ray._private import state

BUNDLES: Mapping[str, dict[str, float]] = {"CPU": {"CPU": 1.0}, "GPU": {"CPU": 1.0, "GPU": 1.0}}
"""What a device of each kind takes of its node."""


_KIND = "accelerator_type:"
"""How Ray's name for a node's GPUs begins among its resources."""


@dataclass(frozen=True)
class NodeGPUs:
    """The GPUs of one node."""

    host: str
    """Its name."""
    count: int
    """How many there are."""
    kind: str
    """As Ray calls them, such as `A100`; empty where it does not know."""
    here: bool
    """Whether this process runs on the node."""


def gpus_by_node() -> list[NodeGPUs]:
    """Those of the cluster that is connected, node by node; nothing where none is, or none has a GPU."""
    if not ray.is_initialized():
        return []
    found, own = [], ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        has = node["Resources"]
        if node["Alive"] and (count := int(has.get("GPU", 0))):
            kinds = (name.removeprefix(_KIND) for name in has if name.startswith(_KIND))
            here = node["NodeID"] == own
            found.append(NodeGPUs(node["NodeManagerHostname"], count, next(kinds, ""), here))
    return found


def check_room(needed: int, kind: str) -> None:
    """Refuse more devices than the cluster has room for, were it free.

    Args:
        needed: devices of the job.
        kind: what each computes on, `CPU` or `GPU`.

    Raises:
        ValueError: it has fewer CPUs or GPUs, or nodes with fewer CPUs than GPUs.
    """
    has = int(ray.cluster_resources().get(kind, 0))
    if has < needed:
        raise ValueError(too_few(needed, has, kind))
    if kind == "CPU":
        return
    nodes = [(node["NodeManagerHostname"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    room = _room([resources for _, resources in nodes], kind)
    if room < needed:
        counts = [(name, int(each.get("CPU", 0)), int(each.get("GPU", 0))) for name, each in nodes]
        poor = [(name, cpus, gpus) for name, cpus, gpus in counts if cpus < gpus]
        where = ", ".join(f"{name} has {cpus} CPUs for {gpus} GPUs" for name, cpus, gpus in poor)
        most = max(gpus for _, _, gpus in poor)
        raise ValueError(
            f"the pools need {needed} devices, each of one CPU and one GPU of a node, and there is room for "
            f"{room}: {where}. {_advice(room, f'`ray start` with --num-cpus {most} there')}"
        )


def too_few(needed: int, has: int, kind: str) -> str:
    """The error of a cluster, or a machine, with fewer devices than a job needs."""
    other = "--strategy.address of a larger cluster"
    there = f"there is 1 {kind}" if has == 1 else f"there are {has} {kind}s"
    return f"the pools need {needed} devices, and {there}. {_advice(has, other)}"


def held(name: str, needed: int, kind: str, *, started: int) -> str:
    """The error of a pool for which other jobs leave no room.

    Args:
        name: of the pool.
        needed: its devices.
        kind: what each computes on, `CPU` or `GPU`.
        started: devices of this job's other pools, which hold theirs.
    """
    nodes, bundle = list(state.available_resources_per_node().values()), BUNDLES[kind]
    left = ", ".join(f"{sum(node.get(each, 0) for node in nodes):.0f} {each}s" for each in bundle)
    room = _room(nodes, kind)
    advice = _advice(room + started, "again when those jobs have ended")
    if room >= needed:  # one node had room for all when it was asked for
        advice = "Type the command again: they are on several nodes, and were sought on one that had room."
    return (
        f"pool {name} needs {needed} devices, each of one {' and one '.join(bundle)}; other jobs and "
        f"{started} devices of this one leave {left}. {advice}"
    )


def fits_a_node(needed: int, kind: str) -> bool:
    """Whether one node alone has room for so many devices, beside those of other jobs and pools."""
    return any(_room([node], kind) >= needed for node in state.available_resources_per_node().values())


def _room(nodes: Iterable[Mapping[str, float]], kind: str) -> int:
    """Devices for which there is room, given what each node has: one's CPU and GPU are on the same node."""
    return sum(int(min(node.get(each, 0) for each in BUNDLES[kind])) for node in nodes)


def _advice(devices: int, other: str) -> str:
    fewer = f"--strategy.devices {devices} (--strategy colocated takes any number), or "
    return f"Try {fewer if devices else ''}{other}."
