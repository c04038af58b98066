"""Collectives of `ShardedDecoder` over the ranks of one group; for a rank alone they do nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """A process group that this rank is in, or this rank alone.

    Args:
        group: the group; None for one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        """Number of ranks."""
        self.index = 0 if group is None else dist.get_rank(group)
        """This rank's number in the group, from 0."""

    def total(self, x: Tensor) -> Tensor:
        """Sum the tensors of all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self._group)
        return x

    def least(self, number: int) -> int:
        """The smallest number of all ranks."""
        if self.size == 1:
            return number
        numbers = torch.tensor(number)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self._group)
        return int(numbers)

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, [ranks, *x.shape], on every rank."""
        if self.size == 1:
            return x[None]
        every = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather_single(every, x.contiguous(), group=self._group)
        return every.view(self.size, *x.shape)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """The tensors of all ranks, on the first rank; None on the others."""
        if self.size == 1:
            return [x]
        every = [torch.empty_like(x) for _ in range(self.size)] if self.index == 0 else None
        dist.gather(x, every, group=self._group, group_dst=0)
        return every

    def broadcast(self, x: Tensor, source: int) -> None:
        """Overwrite `x` with the tensor of rank `source`."""
        if self.size > 1:
            dist.broadcast(x, group=self._group, group_src=source)

    def send(self, x: Tensor, target: int) -> None:
        """Send `x` to another rank, which calls `receive`."""
        self._exchange(dist.P2POp(dist.isend, x, group=self._group, group_peer=target))

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Overwrite `x` with what another rank sends."""
        self._exchange(dist.P2POp(dist.irecv, x, group=self._group, group_peer=source))
        return x

    @staticmethod
    def _exchange(operation: dist.P2POp) -> None:
        """Wait for a batch of one: NCCL would make a communicator of two ranks for what is not in a batch."""
        for work in dist.batch_isend_irecv([operation]):
            work.wait()
