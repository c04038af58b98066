"""Which models are placed on which devices: what a run logs before its devices start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import cast

from lightning.pytorch.utilities import rank_zero_info

from rlhf_lightning.controller import Remote
from rlhf_lightning.controller.cluster import num_gpus
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.engines import is_fresh
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.parallel.ranks import ranks_text
from rlhf_lightning.spec import EMBEDDED
from rlhf_lightning.workers.generator import Generator
from rlhf_lightning.workers.role import Role
from rlhf_lightning.workers.settings import Settings

NAMED = 4
"""Most nodes that a line names."""


def log_placements(placements: Mapping[str, Placement], nodes: Sequence[str] = ()) -> None:
    """Log the summary of a run's placements; see `placement_summary`."""
    rank_zero_info(placement_summary(placements, gpu=num_gpus() > 0, nodes=nodes))


def placement_summary(placements: Mapping[str, Placement], *, gpu: bool, nodes: Sequence[str]) -> str:
    """The devices, engines and types, and for each pool a line such as `0-3: actor d4, critic d4, reward`.

    Last lines name models with tensor groups on several nodes, those whose directories hold no weights, and
    those that compute on GPUs in float32, unasked.

    Args:
        placements: of all roles; those without a model have no sizes.
        gpu: whether the devices are GPUs.
        nodes: name of each device's node; said where they differ.
    """
    pools: dict[tuple[int, ...], list[str]] = {}
    for name, placement in placements.items():
        divided = cast(Role, placement.role).path
        said = f"{name} {_sizes(placement.layout)}" if divided else name
        pools.setdefault(placement.devices, []).append(said)
    count = len({device for devices in pools for device in devices})
    settings = cast(Settings, next(iter(placements.values())).settings)
    kind = f"{'GPU' if gpu else 'CPU'}{'s' * (count != 1)}"
    models = {name: role for name, p in placements.items() if (role := cast(Role, p.role)).path}
    types = " and ".join(sorted({role.computes_in for role in models.values()}))
    engines = f"engine {settings.engine}, generator {settings.generator}"
    lines = [f"{count} {kind}, {engines}{types and f', {types}'}"]
    names = nodes if len(set(nodes)) > 1 else ()
    lines += [
        f"  {ranks_text(devices)}{_where(devices, names)}: {', '.join(said)}"
        for devices, said in pools.items()
    ]
    if spread := [name for name, placement in placements.items() if _spreads(placement, names)]:
        lines.append(f"  tensor groups on several nodes, over their network: {', '.join(spread)}")
    if fresh := [name for name, placement in placements.items() if _begins_fresh(placement.role)]:
        lines.append(f"  fresh weights, as their directories hold a config.json alone: {', '.join(fresh)}")
    return "\n".join([*lines, *(_slow(models) if gpu else [])])


def _slow(models: Mapping[str, Role]) -> list[str]:
    """A line of the models whose type nobody chose, and what to type for it: others follow the actor."""
    slow = {name: role for name, role in models.items() if not role.dtype and role.path != EMBEDDED}
    actor = slow["actor"].path if "actor" in slow else None
    options = [f"--algo.{n}.dtype bfloat16" for n, r in slow.items() if n == "actor" or r.path != actor]
    said = f"  float32 on GPUs, many times slower than bfloat16: {', '.join(slow)} ({', '.join(options)})"
    return [said] if slow else []


def _spreads(placement: Placement, nodes: Sequence[str]) -> bool:
    """Whether ranks that divide the layers of a model are on several of these nodes."""
    groups = placement.layout.groups("t") if nodes else []
    return any(len({nodes[placement.devices[rank]] for rank in ranks}) > 1 for ranks in groups)


def _begins_fresh(role: Remote) -> bool:
    """Whether a model's weights are those of its seed; a generator's are the actor's."""
    return isinstance(role, Role) and not isinstance(role, Generator) and bool(role.path) and is_fresh(role)


def _where(devices: tuple[int, ...], nodes: Sequence[str]) -> str:
    """` (node-a)` or ` (0-3 node-a, 4-7 node-b)`; of many nodes the first ones and the last."""
    if not nodes:
        return ""
    parts = [(name, tuple(found)) for name, found in groupby(devices, key=nodes.__getitem__)]
    if len(parts) == 1:
        return f" ({parts[0][0]})"
    words = [f"{ranks_text(found)} {name}" for name, found in parts]
    return f" ({', '.join([*words[:3], '..', words[-1]] if len(words) > NAMED else words)})"


def _sizes(layout: ParallelLayout) -> str:
    """`p2 t4 d1`, or `d8` of replicas alone; `-> pg1 tg2 dg4` where the model generates in other shards."""
    train = layout.sizes if layout.p * layout.t > 1 else f"d{layout.d}"
    generating = layout.generating
    return train if generating.num_micro == 1 else f"{train} -> {generating.sizes}"
