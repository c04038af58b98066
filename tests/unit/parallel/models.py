"""Models as lists of parameters, their values, and a layout's shards cut out of them by the definition."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_lightning.parallel import Generation, ParallelLayout, Sharded, even_stages, holds
from rlhf_lightning.parallel.gathering import GatheredShard
from rlhf_lightning.parallel.layout import Order, Rule
from rlhf_lightning.parallel.transition import HybridBuffer


def llama(num_layers: int, *, hidden: int, vocabulary: int, tied: bool) -> list[Sharded]:
    """The parameters of a Llama or Qwen2 in Megatron's layout: 2 key-value groups, 4 query heads."""
    inner, head = 2 * hidden, hidden // 4
    found = [Sharded("embedding", (vocabulary, hidden), "ends" if tied else "first", 0)]
    for i in range(num_layers):
        found += [
            Sharded(f"{i}.norm", (hidden,), i),
            Sharded(f"{i}.qkv", (2 * (2 + 2) * head, hidden), i, 0),
            Sharded(f"{i}.qkv.bias", (2 * (2 + 2) * head,), i, 0),
            Sharded(f"{i}.proj", (hidden, hidden), i, 1),
            Sharded(f"{i}.fc1", (2 * inner, hidden), i, 0, (inner, inner)),
            Sharded(f"{i}.fc2", (hidden, inner), i, 1),
        ]
    found.append(Sharded("final_norm", (hidden,), "last"))
    if not tied:
        found.append(Sharded("head", (vocabulary, hidden), "last", 0))
    return found


@dataclass(frozen=True)
class Case:
    """A model and the layouts that it trains and generates in."""

    train: tuple[int, int, int]
    generate: tuple[int, int]
    num_layers: int = 4
    tied: bool = False
    order: Order = "tpd"
    chunks: int = 1
    hidden: int = 32
    vocabulary: int = 48
    dtype: torch.dtype = torch.float32
    rule: Rule = "hybridflow"

    def __str__(self) -> str:
        plain = Case(self.train, self.generate)
        names = [field.name for field in fields(self)]
        more = [f"{n}={getattr(self, n)}" for n in names if getattr(self, n) != getattr(plain, n)]
        return " ".join([f"{self.train} -> {self.generate}", *more])

    @cached_property
    def layout(self) -> ParallelLayout:
        p, t, d = self.train
        return ParallelLayout(p, t, d, order=self.order, generation=Generation(*self.generate, self.rule))

    @cached_property
    def params(self) -> list[Sharded]:
        return llama(self.num_layers, hidden=self.hidden, vocabulary=self.vocabulary, tied=self.tied)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        return even_stages(self.num_layers, self.train[0], chunks=self.chunks)

    @property
    def model_bytes(self) -> int:
        """The whole model."""
        return sum(param.numel for param in self.params) * self.dtype.itemsize

    def trained(self, rank: int) -> list[Sharded]:
        """What a rank trains."""
        stage = self.layout.coordinate(rank).p
        return [param for param in self.params if holds(param, self.stages, stage)]

    def generated(self, rank: int) -> list[Sharded]:
        """What a rank generates with."""
        at, each = self.layout.generating.coordinate(rank), self.train[0] // self.generate[0]
        stages = range(at.p * each, (at.p + 1) * each)
        return [q for q in self.params if any(holds(q, self.stages, stage) for stage in stages)]

    def training_bytes(self, rank: int) -> int:
        t = self.layout.t
        return sum(prod(q.shard_shape(t)) for q in self.trained(rank)) * self.dtype.itemsize

    def generation_bytes(self, rank: int) -> int:
        t = self.layout.generating.t
        return sum(prod(q.shard_shape(t)) for q in self.generated(rank)) * self.dtype.itemsize

    def whole(self, param: Sharded) -> Tensor:
        """Values of a parameter: every rank makes the same."""
        start = zlib.crc32(param.name.encode()) % 1000
        return torch.arange(start, start + param.numel).div(1000).to(self.dtype).view(param.shape)

    def training_shard(self, rank: int) -> dict[str, Tensor]:
        """Cut out of the whole model: every parameter contiguous, in memory of its own."""
        t, index = self.layout.t, self.layout.coordinate(rank).t
        return {q.name: q.shard(self.whole(q), t, index).clone().contiguous() for q in self.trained(rank)}

    def generation_shard(self, rank: int) -> dict[str, Tensor]:
        """Cut out of the whole model: chunk by chunk, each chunk one tensor rank's shard."""
        t, each = self.layout.t, self.layout.t // self.generate[1]
        first = self.layout.generating.coordinate(rank).t * each
        found = {}
        for param in self.generated(rank):
            whole = self.whole(param)
            chunks = [param.shard(whole, t, index) for index in range(first, first + each)]
            found[param.name] = whole if param.dim is None else torch.cat(chunks, dim=param.dim)
        return found

    def buffer(self) -> HybridBuffer:
        """This rank's, with a new group; every rank calls it."""
        rank = dist.get_rank()
        group, _ = dist.new_subgroups_by_enumeration(self.layout.generating.groups("micro"))
        assert group is not None
        parameters = {name: nn.Parameter(value) for name, value in self.training_shard(rank).items()}
        return HybridBuffer(
            self.params, self.stages, self.layout, rank=rank, group=group, parameters=parameters
        )

    def gathered(self) -> GatheredShard:
        """This rank's under the vanilla rule, with a new group; every rank calls it."""
        rank = dist.get_rank()
        group, _ = dist.new_subgroups_by_enumeration(self.layout.replicas)
        assert group is not None
        return GatheredShard(
            self.params,
            self.stages,
            self.layout,
            rank=rank,
            group=group,
            parameters={name: nn.Parameter(value) for name, value in self.training_shard(rank).items()},
        )
