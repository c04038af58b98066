"""From any layout to any other, on other devices or on some of the same: an actor to a separate generator.

            device 0, node 0      device 1, node 0      device 2, node 1
source      layers 0, 1           layers 2, 3
target      layers 0 to 3                               layers 0 to 3
            keeps 0, 1;                                 gets 0, 1 from device 0,
            gets 2, 3 from 1                            gets 2, 3 from device 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhf_lightning.parallel.intervals import Interval, meet, minus, pieces
from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.parallel.reshard import Receive, sent_by
from rlhf_lightning.parallel.weights import Bytes, Shard, Slice, Stages, Weights, total


@dataclass(frozen=True)
class Placement:
    """Which device holds which shard.

    Raises:
        ValueError: the devices or the stages are not those of the layout.
    """

    layout: ParallelLayout
    stages: Stages
    """Layers of each training stage."""
    devices: tuple[int, ...]
    """Global rank of the device behind each rank of the layout."""

    def __post_init__(self) -> None:
        ranks = self.layout.num_ranks
        if not len(self.devices) == len(set(self.devices)) == ranks:
            raise ValueError(
                f"Placement(devices={self.devices}): the layout has p t d = {ranks} ranks. "
                f"Give {ranks} devices, each once."
            )
        if len(self.stages) != self.layout.p:
            raise ValueError(
                f"Placement: {len(self.stages)} stages of layers for p={self.layout.p}. "
                f"Give the layers of {self.layout.p} stages."
            )

    def shards(self, weights: Weights) -> dict[int, Shard]:
        """What each device holds."""
        mine = replace(weights, stages=self.stages)
        return {device: mine.training(self.layout, rank) for rank, device in enumerate(self.devices)}


@dataclass(frozen=True)
class DevicePlan:
    """What one device keeps, receives and sends."""

    device: int
    keeps: tuple[Slice, ...]
    """Of its target shard what it holds already."""
    receives: tuple[Receive, ...]
    """By the device that sends; the group is that one and this."""
    sent_bytes: Bytes
    """Counted once for each receiver."""
    received_bytes: Bytes
    network_bytes: Bytes
    """Of the bytes received those from another node."""


def redistribute(
    weights: Weights, source: Placement, target: Placement, *, devices_per_node: int
) -> tuple[DevicePlan, ...]:
    """Plan how the shards of one placement become those of another.

    Minimised exactly: the bytes that each device receives (none twice, none that it holds), and of these the
    bytes from another node (only what no device of its own node held before; no device passes on what it has
    just received). Then greedily the bytes that the busiest device sends: of the owners that are equally near
    a piece comes from the one that has sent the least so far, whatever it sent to whom. A piece is of one
    parameter, and ends where the shard of an owner ends.

    Args:
        weights: what is moved; the stages are those of the placements.
        source: who holds what now.
        target: who is to hold what.
        devices_per_node: devices 0 to n - 1 are in one node, the next n in the next.

    Returns:
        The plan of each device of either placement, in order.

    Raises:
        ValueError: a layout does not divide the model.
    """
    if devices_per_node < 1:
        raise ValueError(f"redistribute(devices_per_node={devices_per_node}): at least 1. Try 8.")
    held, wanted = source.shards(weights), target.shards(weights)
    receives = {
        device: [
            Receive.of(giver, (giver, device), weights.slices(shard))
            for giver, shard in sorted(found.items())
        ]
        for device, found in _routes(weights, held, wanted, devices_per_node=devices_per_node).items()
    }
    sent = sent_by(receives.values())
    plans = []
    for device, got in sorted(receives.items()):
        mine, node = held.get(device, {}), device // devices_per_node
        keeps = {name: meet(need, mine.get(name, ())) for name, need in wanted.get(device, {}).items()}
        plans.append(
            DevicePlan(
                device=device,
                keeps=tuple(weights.slices(keeps)),
                receives=tuple(got),
                sent_bytes=sent.get(device, 0),
                received_bytes=total(got),
                network_bytes=total(r for r in got if r.source // devices_per_node != node),
            )
        )
    return tuple(plans)


def _routes(
    weights: Weights, held: Mapping[int, Shard], wanted: Mapping[int, Shard], *, devices_per_node: int
) -> dict[int, dict[int, Shard]]:
    """What each device lacks, by the device that gives it."""
    owners: dict[str, dict[int, list[Interval]]] = {}
    for device, shard in held.items():
        for name, intervals in shard.items():
            owners.setdefault(name, {})[device] = intervals
    sent: dict[int, Bytes] = dict.fromkeys(held, 0)
    found: dict[int, dict[int, Shard]] = {device: {} for device in {*held, *wanted}}
    for device, shard in sorted(wanted.items()):
        far = {other: other // devices_per_node != device // devices_per_node for other in held}
        for name, intervals in shard.items():
            missing = minus(intervals, held.get(device, {}).get(name, ()))
            cuts = [end for own in owners[name].values() for interval in own for end in interval]
            for piece in pieces(missing, cuts):
                able = [other for other, own in owners[name].items() if meet([piece], own)]
                giver = min(able, key=lambda other: (far[other], sent[other]))
                found[device].setdefault(giver, {}).setdefault(name, []).append(piece)
                sent[giver] += total(weights.slices({name: [piece]}))
    return found
