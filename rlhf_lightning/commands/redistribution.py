"""`rlhf reshard --apart`: what moves where the actor's weights go to a generator on other devices."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from rlhf_lightning.commands.alike import alike
from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.parallel.ranks import ranks_text
from rlhf_lightning.parallel.redistribute import DevicePlan, Placement, redistribute
from rlhf_lightning.parallel.sharding import Sharded, even_stages
from rlhf_lightning.parallel.weights import Bytes, Weights, exact, total

Plans = Sequence[DevicePlan]
COLUMNS = ("kept", "received", "network", "sent")
"""Columns of bytes of each device; `network` are those received from another node."""


def planned(
    size_bytes: int, train: ParallelLayout, apart: ParallelLayout, *, layers: int, devices_per_node: int
) -> Plans:
    """The transfers between all devices; the generator has the devices after those that train.

    Args:
        size_bytes: of all parameters, spread evenly over the layers.
        train: layout of the actor.
        apart: layout of the generator.
        layers: of the model.
        devices_per_node: devices 0 to n - 1 are in one node, the next n in the next.

    Raises:
        ValueError: the layers do not divide into the stages of one of the layouts.
    """
    for layout in (train, apart):
        if layers % layout.p:
            raise ValueError(
                f"p={layout.p}: {layers} layers do not divide into as many stages. "
                f"Try p={math.gcd(layers, layout.p)}."
            )
    width, first = math.lcm(train.t, apart.t), train.num_ranks
    params = tuple(Sharded(f"layer {i}", (width,), i, 0) for i in range(layers))
    source = Placement(train, even_stages(layers, train.p), tuple(range(first)))
    target = Placement(apart, even_stages(layers, apart.p), tuple(range(first, first + apart.num_ranks)))
    weights = Weights(params, source.stages, exact(Fraction(size_bytes, layers * width)))
    return redistribute(weights, source, target, devices_per_node=devices_per_node)


def as_json(plans: Plans) -> str:
    """For each device its bytes, and from whom it receives."""
    return json.dumps(
        [
            {
                "device": plan.device,
                **{f"{name}_bytes": float(size) for name, size in zip(COLUMNS, _bytes(plan), strict=True)},
                "sources": [receive.source for receive in plan.receives],
            }
            for plan in plans
        ]
    )


def as_text(plans: Plans, title: str, size: Callable[[Bytes], str]) -> str:
    """A line for devices that are alike, and the sums.

    Args:
        plans: of all devices.
        title: first line.
        size: writes bytes.
    """
    heads = "".join(f"{name:>12}" for name in COLUMNS)
    rows = alike(
        (plan.device, (_bytes(plan), ranks_text(sorted({r.source for r in plan.receives})))) for plan in plans
    )
    width = max(8, *(len(devices) + 1 for devices, _ in rows))
    lines = [title, "", f"{'device':>{width}}{heads}   from"]
    for devices, (found, sources) in rows:
        sizes = "".join(f"{size(one):>12}" for one in found)
        lines.append(f"{devices:>{width}}{sizes}   {sources}".rstrip())
    sums = [exact(sum(column)) for column in zip(*map(_bytes, plans), strict=True)]
    lines.append(f"{'all':>{width}}{''.join(f'{size(found):>12}' for found in sums)}")
    return "\n".join(lines) + "\n"


def _bytes(plan: DevicePlan) -> tuple[Bytes, ...]:
    return total(plan.keeps), plan.received_bytes, plan.network_bytes, plan.sent_bytes
