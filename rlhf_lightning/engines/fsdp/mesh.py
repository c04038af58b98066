"""The device mesh of one model under FSDP: copies of the weights x shards of a copy x tensor ranks.

8 ranks, shard=2, tensor=2   [copy, shard, tensor]   copies sum their gradients
                             [[0 1] [2 3]]           shards divide the parameters of a copy
                             [[4 5] [6 7]]           tensor ranks divide every layer, and have the same rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlhf_lightning.parallel.groups import meet

_AXES = ("copy", "shard", "tensor")

_made = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]()
"""The groups made so far in this process's world, by their ranks: models on the same devices share them."""


@dataclass(frozen=True)
class Mesh:
    """The groups of ranks that train one model, seen from this rank."""

    data: DeviceMesh
    """[shard] or [copy, shard]: ranks with rows of their own, over which FSDP shards and sums gradients."""
    tensor: DeviceMesh | None
    """Ranks that divide every layer; None where each has whole layers."""
    everyone: dist.ProcessGroup
    """All ranks of the model."""


def model_mesh(
    data: dist.ProcessGroup | None, tensor: dist.ProcessGroup | None, *, shard: int, device: torch.device
) -> Mesh:
    """Arrange the ranks of a model, and make the groups that no model has yet; all its ranks call it.

    Args:
        data: ranks with rows of their own; None for one.
        tensor: ranks that divide every layer, neighbours; None for one.
        shard: data-parallel neighbours that divide a copy; 0 for all of them.
        device: of this rank.
    """
    known = [group for group in (data, tensor) if group is not None]
    rows = _rows(data, tensor)
    grid = rows.view(-1, shard if len(rows) > 1 and shard else len(rows), rows.shape[1])
    axes = [axis for axis, name in enumerate(_AXES) if name == "shard" or grid.shape[axis] > 1]
    names = tuple(_AXES[axis] for axis in axes)
    lines = [grid.movedim(axis, -1).flatten(0, 1).tolist() for axis in axes]
    mesh = DeviceMesh.from_group(
        [_group(line, known, device) for line in lines],
        device.type,
        mesh=grid.view([grid.shape[axis] for axis in axes]),
        mesh_dim_names=names,
    )
    return Mesh(
        data=mesh["copy", "shard"] if "copy" in names else mesh["shard"],
        tensor=mesh["tensor"] if "tensor" in names else None,
        everyone=_group([grid.flatten().tolist()], known, device),
    )


def _rows(data: dist.ProcessGroup | None, tensor: dist.ProcessGroup | None) -> Tensor:
    """The model's global ranks, [d, t]."""
    own = [dist.get_rank()] if tensor is None else dist.get_process_group_ranks(tensor)
    if data is None:
        return torch.tensor([own])
    if tensor is None:
        return torch.tensor(dist.get_process_group_ranks(data))[:, None]
    rows: list[list[int]] = [own] * dist.get_world_size(data)
    dist.all_gather_object(rows, own, group=data)
    return torch.tensor(rows)


def _group(
    lines: Sequence[list[int]], known: Sequence[dist.ProcessGroup], device: torch.device
) -> dist.ProcessGroup:
    """The group of that line of ranks which has this one: a known group, an earlier model's, or a new one."""
    line = next(line for line in lines if dist.get_rank() in line)
    for group in known:
        if dist.get_process_group_ranks(group) == line:
            return group
    world = dist.group.WORLD
    assert world is not None
    made, ranks = _made.setdefault(world, {}), tuple(line)
    if ranks not in made:
        # Only members make it, so ranks of other models need not take part. Time-out as of the known ones.
        options = [group._get_backend(torch.device("cpu")).options for group in known]
        timeout = options[0]._timeout if options else None
        made[ranks] = dist.new_group(line, timeout=timeout, use_local_synchronization=True)
        meet(made[ranks], device)
    return made[ranks]
