"""The groups of ranks that one model's training and generation communicate in.

train (p=1, t=4, d=2), generate (1, 2)        tensor 0123 4567        generation_tensor 02 13 46 57
                                              data 04 15 26 37        micro 01 23 45 67
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlhf_lightning.parallel.layout import ParallelLayout

Ranks = tuple[int, ...]


def named_groups(layout: ParallelLayout) -> dict[str, list[list[int]]]:
    """All groups of a layout by name, those of one rank too; each rank is in at most one of each name."""
    pipelines, generating = layout.groups("p"), layout.generating
    return {
        "tensor": layout.groups("t"),
        "pipeline": pipelines,
        "data": layout.groups("d"),
        "replica": layout.replicas,
        "ends": [sorted({ranks[0], ranks[-1]}) for ranks in pipelines],
        "alone": [[rank] for rank in range(layout.num_ranks)],
        "micro": generating.groups("micro"),
        "generation_tensor": generating.groups("t"),
        "generation_pipeline": generating.groups("p"),
    }


@dataclass(frozen=True)
class ModelGroups:
    """The process groups that one rank of a model is in, those of one rank too."""

    tensor: dist.ProcessGroup
    """Same stage and replica."""
    pipeline: dist.ProcessGroup
    """Same tensor rank and replica, stage by stage."""
    data: dist.ProcessGroup
    """Same stage and tensor rank."""
    replica: dist.ProcessGroup
    """Same replica: p t ranks."""
    ends: dist.ProcessGroup | None
    """First and last stage of a pipeline, which share a tied embedding; None on stages between."""
    alone: dist.ProcessGroup
    """This rank."""
    micro: dist.ProcessGroup
    """Micro-DP: under HybridFlow's rule the ranks whose shards make one generation shard."""
    generation_tensor: dist.ProcessGroup
    """Tensor shards of one copy as it generates."""
    generation_pipeline: dist.ProcessGroup
    """Stages of one copy as it generates."""

    @classmethod
    def create(
        cls, layout: ParallelLayout, rank: int, group: Callable[[Ranks], dist.ProcessGroup]
    ) -> ModelGroups:
        """Collect the groups that a rank is in.

        Args:
            layout: the model's.
            rank: within the layout.
            group: finds the process group of some ranks of the layout. Where groups do not exist yet use
                `create_all`: every rank of the world must take part in making each of them.
        """
        found = {}
        for name, groups in named_groups(layout).items():
            mine = next((ranks for ranks in groups if rank in ranks), None)
            found[name] = None if mine is None else group(tuple(mine))
        return cls(**found)  # type: ignore[arg-type]

    @classmethod
    def create_all(cls, layout: ParallelLayout) -> ModelGroups:
        """Make all groups of a layout on the first devices of the world; every rank of the world calls it."""
        made: dict[Ranks, dist.ProcessGroup] = {r: dist.new_group(list(r)) for r in all_ranks(layout)}
        return cls.create(layout, dist.get_rank(), made.__getitem__)


def all_ranks(layout: ParallelLayout) -> list[Ranks]:
    """The members of every group of a layout, each once, in an order that all ranks share."""
    every = (tuple(ranks) for groups in named_groups(layout).values() for ranks in groups)
    return list(dict.fromkeys(every))


def joined(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of these global ranks that this process has joined; of several the last."""
    every = reversed(distributed_c10d._world.pg_group_ranks.items())
    found = next((group for group, members in every if sorted(members) == sorted(ranks)), None)
    assert found is not None, f"the job has made no group of the ranks {ranks}"
    return found


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let the ranks of a group communicate once, from their devices; all of them call it.

    NCCL makes a group's communicator at its first call, in memory that torch cannot give it from what it
    keeps: made in the middle of a run, it may find none left. What is wrong with NCCL comes out here, too.
    """
    present = torch.ones(1, device=device)
    dist.all_reduce(present, group=group)
    assert present.item() == dist.get_world_size(group)


def if_several(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group if it has several ranks, else None: a rank alone has nothing to communicate."""
    return group if group is not None and dist.get_world_size(group) > 1 else None
