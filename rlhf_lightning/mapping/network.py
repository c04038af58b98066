"""Seconds of collectives between the devices of a group, which may lie in several nodes.

    time = traffic of a rank / bandwidth + hops x latency
Traffic is that of ring algorithms (Patarasuk and Yuan 2009): (n - 1) / n of the whole for an all-gather or a
reduce-scatter, twice that for an all-reduce. Hops are those of a tree, log2 n, as NCCL takes it for short
messages. Where a ring leaves its node, the rings of all groups of that node share the node's network:
`inter_bandwidth / lanes`. Ranks fill node after node (see `ParallelLayout`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from rlhf_lightning.mapping.hardware import Hardware
from rlhf_lightning.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class Group:
    """Ranks that communicate."""

    size: int
    """How many ranks."""
    crosses: bool
    """Whether they lie in several nodes."""
    lanes: int = 1
    """How many groups of this kind share one node's network."""

    @property
    def network(self) -> str:
        """What it runs over, in the words of a report."""
        return "inter-node network" if self.crosses else "intra-node network"


def tensor_group(hardware: Hardware, layout: ParallelLayout) -> Group:
    """Ranks that share each matrix product."""
    return Group(layout.t, layout.t > hardware.gpus_per_node)


def shard_group(hardware: Hardware, layout: ParallelLayout, sharers: int) -> Group:
    """Data-parallel ranks, `sharers` of them, that divide one copy of the states; see `Workload.sharers`."""
    stride = layout.t * layout.p
    return Group(sharers, _crosses(hardware, stride * sharers), min(stride, hardware.gpus_per_node))


def copy_group(hardware: Hardware, layout: ParallelLayout, sharers: int) -> Group:
    """Data-parallel ranks that hold the same part of a copy, which `sharers` ranks divide."""
    stride = layout.t * layout.p * sharers
    return Group(
        layout.d // sharers, _crosses(hardware, layout.num_ranks), min(stride, hardware.gpus_per_node)
    )


def stage_group(hardware: Hardware, layout: ParallelLayout) -> Group:
    """Two ranks of neighbouring pipeline stages; it crosses nodes if one such pair does, the slowest."""
    crosses = layout.p > 1 and _crosses(hardware, layout.t * layout.p)
    return Group(min(layout.p, 2), crosses, min(layout.t, hardware.gpus_per_node))


def reshard_group(hardware: Hardware, layout: ParallelLayout) -> Group:
    """Ranks that gather a generation shard: HybridFlow's micro data-parallel group (section 5.2)."""
    generating = layout.generating
    stages, shards = layout.p // generating.p, layout.t // generating.t
    node = hardware.gpus_per_node
    crosses = _reshard_crosses(layout.p, layout.t, stages, shards, node)
    return Group(stages * shards, crosses, min(generating.t, node))


@cache
def _reshard_crosses(p: int, t: int, stages: int, shards: int, node: int) -> bool:
    """Whether one of the groups of `stages` consecutive stages x `shards` shards lies in several nodes."""
    firsts = (stage * t + shard for stage in range(0, p, stages) for shard in range(0, t, shards))
    return any(first // node != (first + (stages - 1) * t + shards - 1) // node for first in firsts)


def all_gather(hardware: Hardware, group: Group, size_bytes: float) -> float:
    """Seconds of an all-gather (or a reduce-scatter): every rank has a part of `size_bytes`, and then all."""
    if group.size < 2:
        return 0.0
    traffic = size_bytes * (group.size - 1) / group.size
    return traffic / _bandwidth(hardware, group) + math.log2(group.size) * _latency(hardware, group)


def all_reduce(hardware: Hardware, group: Group, size_bytes: float) -> float:
    """Seconds of an all-reduce of `size_bytes`."""
    return 2 * all_gather(hardware, group, size_bytes)


def send(hardware: Hardware, group: Group, size_bytes: float) -> float:
    """Seconds of sending `size_bytes` to the other rank of a `stage_group`."""
    if group.size < 2:
        return 0.0
    return size_bytes / _bandwidth(hardware, group) + _latency(hardware, group)


def _crosses(hardware: Hardware, ranks: int) -> bool:
    return ranks > hardware.gpus_per_node


def _bandwidth(hardware: Hardware, group: Group) -> float:
    intra = hardware.intra_bandwidth * hardware.efficiency.intra
    if not group.crosses:
        return intra
    return min(intra, hardware.inter_bandwidth * hardware.efficiency.inter / group.lanes)


def _latency(hardware: Hardware, group: Group) -> float:
    return hardware.inter_latency if group.crosses else hardware.intra_latency
