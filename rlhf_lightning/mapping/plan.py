"""From a request to its best mappings, or to an error that says how much memory is missing."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_lightning.mapping.auto_parallel import AutoParallel
from rlhf_lightning.mapping.dataflow import Work
from rlhf_lightning.mapping.partitions import pool_sizes, set_partitions
from rlhf_lightning.mapping.search import DeviceKind, DeviceMapping, Pool, Search, Sets
from rlhf_lightning.mapping.simulated import WAVES, SimulatedCosts
from rlhf_lightning.mapping.workload import Workload

LARGEST = 4096
"""Devices of the largest cluster that is searched, or suggested for models that do not fit."""


@dataclass(frozen=True)
class Task:
    """What one model does in one stage of a mapping."""

    role: str
    stage: str
    work: Work
    seconds: float
    """Predicted; a generation's with the transition to its layout."""
    bound: str
    """What most of the seconds are spent on, as in `Estimate`."""
    memory_bytes: float
    """Bytes on each device of the pool meanwhile, those that the other models keep there included."""
    rows_at_once: int = 0
    """Rows that a replica decodes at once; 0: all of them."""


@dataclass(frozen=True)
class Plan:
    """The best mappings of one request."""

    clusters: tuple[tuple[SimulatedCosts, int], ...]
    """For each kind of devices, what the models cost on them, and how many there are."""
    mappings: tuple[DeviceMapping, ...]
    """The best mapping of each of the best placements, fastest first."""
    baselines: Mapping[str, DeviceMapping | None]
    """The best mapping of each placement to compare with, by name; None where it does not fit."""
    search_s: float
    """Seconds that the search took."""

    @property
    def costs(self) -> SimulatedCosts:
        """What the models cost on the first kind of devices; the work is the same on all kinds."""
        return self.clusters[0][0]

    @property
    def devices(self) -> int:
        """Number of devices, of all kinds together."""
        return sum(devices for _, devices in self.clusters)

    @property
    def cluster(self) -> str:
        """The cluster in words, such as `16 x a100-80gb and 8 x h100-80gb`."""
        return cluster_text(self.clusters)

    def costs_on(self, pool: Pool) -> SimulatedCosts:
        """What the models cost on the pool's kind of devices."""
        return self.clusters[pool.kind][0]

    def hardware(self, pool: Pool) -> str:
        """Name of the pool's kind of devices."""
        return self.costs_on(pool).hardware.name

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages."""
        return tuple(stage.name for stage in self.costs.dataflow.stages)

    def tokens_per_s(self, mapping: DeviceMapping) -> float:
        """Tokens of prompts and responses of an iteration, divided by its seconds."""
        workload = self.costs.workload
        return self.costs.dataflow.rows * (workload.prompt + workload.response) / mapping.seconds

    def tasks(self, pool: Pool) -> list[Task]:
        """What the models of a pool do: stage by stage, in each role by role."""
        costs, at = self.costs_on(pool), pool.at
        resident = {role: costs.resident(role, layout) for role, layout in at.items()}
        free = costs.capacity - sum(resident.values())
        result = []
        for i, stage in enumerate(self.stages):
            for role, layout in at.items():
                for work in costs.work(role)[i]:
                    estimate = costs.estimate(role, layout, work, free)
                    used = sum(resident.values()) - resident[role] + costs.used(role, layout, work, free)
                    seconds, rows = estimate.seconds, 0
                    if work.kind == "generate":
                        seconds += costs.transition(role, layout).seconds
                        rows = costs.rows_at_once(role, layout, work, free)
                    result.append(Task(role, stage, work, seconds, estimate.bound, used, rows))
        return result


def plan(
    costs: SimulatedCosts,
    devices: int,
    *,
    sizes: Sequence[int] | None = None,
    baselines: Mapping[str, Sets] | None = None,
    count: int = 5,
    others: Sequence[tuple[SimulatedCosts, int]] = (),
) -> Plan:
    """Search for the best mappings.

    Args:
        costs: what the models cost on the cluster, or on its first kind of devices.
        devices: how many there are.
        sizes: how many of them a set of models can have; None: `pool_sizes`.
        baselines: placements to compare with, by name.
        count: how many mappings to find.
        others: for each further kind of devices, what the same models cost on them, and how many there are.

    Raises:
        ValueError: the devices are too many or do not fill nodes, or the models do not fit; the message says
            what is missing.
    """
    started = time.perf_counter()
    roles = costs.roles
    if not costs.dataflow.roles:
        raise ValueError("the algorithm's step calls no model, so that there is nothing to place.")
    clusters = ((costs, devices), *others)
    if (total := sum(number for _, number in clusters)) > LARGEST:
        raise ValueError(f"{total:,} devices: the search goes up to {LARGEST:,}. Ask for fewer.")
    kinds, offered = [], list[tuple[int, ...]]()
    for i, (on, number) in enumerate(clusters):
        if sizes is None or i:
            _check_devices(on, number, among=len(clusters))
        own = None if i else sizes
        offered.append(tuple(own or pool_sizes(number, on.hardware.gpus_per_node)))
        kinds.append(DeviceKind(on, number, offered[-1]))
    search = Search(kinds, roles)
    found = search.best(count)
    if not found:
        missing = "; ".join(_missing(on, n, own) for (on, n), own in zip(clusters, offered, strict=True))
        if others:
            whole = f"no division of the models over {cluster_text(clusters)} holds them"
            missing = f"{whole}. Each kind alone: {missing}."
        raise ValueError(f"{missing} {_only_replicas(costs)}".rstrip())
    compared = {name: search.best_of(sets) for name, sets in (baselines or {}).items()}
    return Plan(clusters, tuple(found), compared, time.perf_counter() - started)


def cluster_text(clusters: Sequence[tuple[SimulatedCosts, int]]) -> str:
    """A cluster in words: 16 x a100-80gb and 8 x h100-80gb."""
    return " and ".join(f"{devices} x {costs.hardware.name}" for costs, devices in clusters)


def _check_devices(costs: SimulatedCosts, devices: int, *, among: int) -> None:
    """Refuse a number of devices that neither divides a node nor fills whole nodes; see `pool_sizes`.

    Args:
        costs: what the models cost on this kind of devices.
        devices: how many there are of it.
        among: how many kinds the cluster has; of several each has its number in `--hardware`.
    """
    node = costs.hardware.gpus_per_node
    if devices in pool_sizes(devices, node):
        return
    option = f"--hardware {costs.hardware.name}:" if among > 1 else "--devices "
    near = [n for n in pool_sizes(devices + node, node) if n < devices][-1:]
    near += [n for n in pool_sizes(devices + node, node) if n > devices][:1]
    raise ValueError(
        f"{option}{devices}: {costs.hardware.name} has nodes of {node}, and {devices} devices are neither "
        f"whole nodes nor an even share of one, so that tensor shards (t up to {node}) cannot divide them. "
        f"Try {option}{' or '.join(map(str, near))}; {_smallest(costs)}."
    )


def _missing(costs: SimulatedCosts, devices: int, sizes: Sequence[int]) -> str:
    """The error for models that do not fit: how much memory is missing, and which cluster would do."""
    node = costs.hardware.gpus_per_node
    vast = dataclasses.replace(costs.hardware, memory_bytes=1e30, usable_memory=1.0)
    on_vast = SimulatedCosts(
        vast,
        costs.dataflow,
        costs.shapes,
        workload=costs.workload,
        recipes=costs.recipes,
        allows=costs.allows,
    )
    unlimited = AutoParallel(on_vast)
    needed, most = min((unlimited.min_bytes(costs.roles, size), -size) for size in sizes)
    has = costs.capacity
    lead = f"{', '.join(costs.roles)} do not fit on {devices} x {costs.hardware.name}"
    if not math.isfinite(needed):
        return (
            f"{lead}: no layout of tensor shards (within nodes of {node}), pipeline stages and replicas "
            f"divides some model over {devices} devices; {_smallest(costs)}."
        )
    if needed <= has:
        return f"{lead}: {_no_room(costs.workload)}"
    return (
        f"{lead}: together they need at least {needed / 1e9:.1f} GB on each device and {has / 1e9:.1f} GB of "
        f"{costs.hardware.memory_bytes / 1e9:.3g} GB are usable, so that {(needed - has) / 1e9:.1f} GB a "
        f"device ({-most * (needed - has) / 1e9:,.0f} GB in all) are missing; {_smallest(costs)}."
    )


def _no_room(workload: Workload) -> str:
    """The rest of that error where the models fit, and what generation needs beside them does not."""
    if not workload.reserves:
        return (
            f"beside them there is no room for keys and values, of even 1 / {WAVES[-1]} of the rows that a "
            "replica answers. Try more devices, a smaller batch or shorter responses."
        )
    if workload.kv_limit:
        asked = f"{workload.kv_limit / 2**30:g} GiB of keys and values"
        other = "a smaller strategy.settings.vllm.kv_cache_gib"
    else:
        share = workload.generation_share
        asked = f"{share:g} of each device, into which weights, keys and values have to fit"
        other = (
            f"another strategy.settings.vllm.gpu_memory_utilization than {share:g} (smaller where models "
            "leave less free, larger where weights fill it)"
        )
    return f"beside them vLLM does not start: it takes {asked}. Try {other}, or more devices."


def _only_replicas(costs: SimulatedCosts) -> str:
    """That models could not be divided, where they could not."""
    if not costs.only_replicas:
        return ""
    why = costs.undivided or "the engine takes nothing else here"
    return f"Only replicas of whole models were looked at: {why}."


def _smallest(costs: SimulatedCosts) -> str:
    devices = smallest_cluster(costs)
    if devices is None:
        return f"no cluster of up to {LARGEST} such devices holds them"
    return f"the smallest cluster that holds these models has {devices}"


def smallest_cluster(costs: SimulatedCosts) -> int | None:
    """Devices of the smallest cluster on which the models fit in some way; None if it is above LARGEST."""
    node = costs.hardware.gpus_per_node
    layouts, sizes = AutoParallel(costs), pool_sizes(LARGEST, node)
    needs: dict[tuple[int, ...], int | None] = {}

    def need(roles: Sequence[str]) -> int | None:
        key = layouts.key(roles)
        if key not in needs:
            fits = (n for n in sizes if layouts.min_bytes(roles, n) <= costs.capacity)
            needs[key] = next(fits, None)
        return needs[key]

    together = need(costs.roles)
    found = [together] if together is not None else []
    if together is None or together > 1:
        for sets in set_partitions(costs.roles):
            counts = [n for n in map(need, sets) if n is not None]
            if len(counts) == len(sets):
                found.append(next((n for n in sizes if n >= sum(counts)), LARGEST + 1))
    return min((n for n in found if n <= LARGEST), default=None)
