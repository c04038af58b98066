"""The device mesh of one model under FSDP: copies of the weights x shards of a copy x tensor ranks.

8 ranks, shard=2, tensor=2   [copy, shard, tensor]   copies sum their gradients
                             [[0 1] [2 3]]           shards divide the parameters of a copy
                             [[4 5] [6 7]]           tensor ranks divide every layer, and have the same rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlhf_lightning.parallel.groups import joined

_AXES = ("copy", "shard", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The groups of ranks that train one model, seen from this rank."""

    data: DeviceMesh
    """[shard] or [copy, shard]: ranks with rows of their own, over which FSDP shards and sums gradients."""
    tensor: DeviceMesh | None
    """Ranks that divide every layer; None where each has whole layers."""
    everyone: dist.ProcessGroup
    """All ranks of the model."""


def mesh_groups(ranks: Sequence[Sequence[int]], *, shard: int) -> list[tuple[int, ...]]:
    """The groups of several ranks that a model's mesh has, which the job makes beforehand.

    Args:
        ranks: the model's, [d, t].
        shard: as for `model_mesh`.
    """
    grid = _grid(torch.tensor(ranks), shard)
    lines = [line for lines in _lines(grid).values() for line in lines]
    return [tuple(line) for line in [*lines, grid.flatten().tolist()] if len(line) > 1]


def model_mesh(
    data: dist.ProcessGroup | None, tensor: dist.ProcessGroup | None, *, shard: int, device: torch.device
) -> Mesh:
    """Arrange the ranks of a model in the groups that the job has made for it; all its ranks call it.

    Args:
        data: ranks with rows of their own; None for one.
        tensor: ranks that divide every layer, neighbours; None for one.
        shard: data-parallel neighbours that divide a copy; 0 for all of them.
        device: of this rank.
    """
    known = [group for group in (data, tensor) if group is not None]
    grid = _grid(_rows(data, tensor), shard)
    lines = _lines(grid)
    mesh = DeviceMesh.from_group(
        [_group(found, known) for found in lines.values()],
        device.type,
        mesh=grid.view([grid.shape[_AXES.index(name)] for name in lines]),
        mesh_dim_names=tuple(lines),
    )
    return Mesh(
        data=mesh["copy", "shard"] if "copy" in lines else mesh["shard"],
        tensor=mesh["tensor"] if "tensor" in lines else None,
        everyone=_group([grid.flatten().tolist()], known),
    )


def _grid(ranks: Tensor, shard: int) -> Tensor:
    """Ranks [d, t] as [copy, shard, tensor]."""
    return ranks.view(-1, shard if len(ranks) > 1 and shard else len(ranks), ranks.shape[1])


def _lines(grid: Tensor) -> dict[str, list[list[int]]]:
    """The lines of ranks along each axis of a model's mesh, which has that of shards and all above 1."""
    axes = {name: axis for axis, name in enumerate(_AXES) if name == "shard" or grid.shape[axis] > 1}
    return {name: grid.movedim(axis, -1).flatten(0, 1).tolist() for name, axis in axes.items()}


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


def _group(lines: Sequence[list[int]], known: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The group of that line of ranks which has this one: a known one, or another that the job has made."""
    line = next(line for line in lines if dist.get_rank() in line)
    given = (group for group in known if dist.get_process_group_ranks(group) == line)
    return next(given, None) or joined(line)
