"""Three ways from training to generation (HybridFlow section 5, Table 2), each with its own training shard.

HybridFlow      our buffer: gathers within a micro-DP group what the rank does not train
HybridFlow-V    gathers the whole model within the training replica, cuts the generation shard out of it
DeepSpeed-Chat  the same over all ranks, each of which trains an equal part of every parameter (ZeRO-3)

The last two number the shards by the vanilla rule, and their training shard stays where it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_lightning.parallel import Generation, GenerationLayout, ParallelLayout, Sharded, holds
from rlhf_lightning.parallel.gathering import GatheredShard
from rlhf_lightning.parallel.layout import Rule
from rlhf_lightning.parallel.transition import HybridBuffer


@dataclass(frozen=True)
class Rank:
    """One rank of an actor."""

    params: Sequence[Sharded]
    """All parameters of the model."""
    stages: Sequence[Sequence[int]]
    """Layers of each training stage."""
    layout: ParallelLayout
    """Training and generation, by HybridFlow's rule."""
    rank: int
    """Within the layout."""
    device: torch.device
    """Where it computes."""

    def generating(self, rule: Rule) -> GenerationLayout:
        """The generation layout by a rule."""
        return replace(self.layout.generating, rule=rule)

    def whole(self, param: Sharded) -> Tensor:
        """Values of a parameter: the same on every rank."""
        return torch.arange(param.numel, dtype=torch.float32, device=self.device).view(param.shape)

    def trained(self) -> dict[str, Tensor]:
        """The training shard in three dimensions."""
        at = self.layout.coordinate(self.rank)
        mine = [param for param in self.params if holds(param, self.stages, at.p)]
        return {q.name: q.shard(self.whole(q), self.layout.t, at.t).clone().contiguous() for q in mine}

    def chunks(self, rule: Rule) -> dict[str, slice]:
        """What the rank generates with: which training chunks of which parameters."""
        generating = self.generating(rule)
        at, each = generating.coordinate(self.rank), self.layout.t // generating.t
        stages = range(self.layout.p)[at.p * self.layout.p // generating.p :][: self.layout.p // generating.p]
        mine = [q for q in self.params if any(holds(q, self.stages, stage) for stage in stages)]
        return {param.name: slice(at.t * each, (at.t + 1) * each) for param in mine}

    def shard(self, rule: Rule) -> dict[str, Tensor]:
        """The generation shard, cut out of the whole model chunk by chunk."""
        chunks, shard = self.chunks(rule), {}
        for param in self.params:
            if param.name in chunks:
                whole, of = self.whole(param), range(self.layout.t)[chunks[param.name]]
                parts = [param.shard(whole, self.layout.t, index) for index in of]
                shard[param.name] = whole if param.dim is None else torch.cat(parts, dim=param.dim)
        return shard


class Transition(ABC):
    """A way from training to generation, and back; every rank makes it."""

    received_bytes = 0
    """What the last `gather` asked of other ranks."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    @property
    @abstractmethod
    def trained(self) -> list[Tensor]:
        """The tensors that train."""

    @abstractmethod
    def gather(self) -> dict[str, Tensor]:
        """Make the generation shard."""

    def release(self) -> None:  # noqa: B027 - a copy needs only to be dropped
        """Go back to training, once the generation shard is dropped."""

    @abstractmethod
    def expected(self) -> dict[str, Tensor]:
        """What `gather` must give."""


class HybridFlow(Transition):
    """Ours: the training shard is a part of the generation shard."""

    rule: ClassVar[Rule] = "hybridflow"
    buffer: ClassVar[type[HybridBuffer]] = HybridBuffer

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        layout = replace(
            rank.layout, generation=replace(rank.layout.generation or Generation(), rule=self.rule)
        )
        self._buffer = self.buffer(
            rank.params,
            rank.stages,
            layout,
            rank=rank.rank,
            group=_group(self.groups(layout)),
            parameters={name: nn.Parameter(value) for name, value in rank.trained().items()},
        )

    def groups(self, layout: ParallelLayout) -> list[list[int]]:
        """Ranks that gather together."""
        return layout.generating.groups("micro")

    @property
    def trained(self) -> list[Tensor]:
        """The tensors that train."""
        return [parameter.data for parameter in self._buffer.parameters.values()]

    def gather(self) -> dict[str, Tensor]:
        """Make the generation shard."""
        shard = self._buffer.gather()
        self.received_bytes = self._buffer.received_bytes
        return shard

    def release(self) -> None:
        """Keep the own part only."""
        self._buffer.release()

    def expected(self) -> dict[str, Tensor]:
        """What `gather` must give."""
        return self._rank.shard(self.rule)


class HybridFlowV(HybridFlow):
    """Gathers the whole model within the training replica."""

    rule = "vanilla"
    buffer = GatheredShard

    def groups(self, layout: ParallelLayout) -> list[list[int]]:
        """Training replicas."""
        return layout.replicas


class DeepSpeedChat(Transition):
    """Gathers the whole model over all ranks."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        size = rank.layout.num_ranks
        self._group = _group([list(range(size))])
        self._own: dict[str, Tensor] = {}
        for param in rank.params:
            flat = rank.whole(param).flatten()
            padded = torch.nn.functional.pad(flat, (0, -len(flat) % size))
            self._own[param.name] = padded.chunk(size)[rank.rank].clone()
        self._chunks = rank.chunks("vanilla")
        self._index = rank.generating("vanilla").coordinate(rank.rank).t

    @property
    def trained(self) -> list[Tensor]:
        """The tensors that train."""
        return list(self._own.values())

    def gather(self) -> dict[str, Tensor]:
        """Make the generation shard."""
        wholes, works, self.received_bytes = {}, [], 0
        for name, own in self._own.items():
            whole = wholes[name] = own.new_empty(self._rank.layout.num_ranks * own.numel())
            works.append(dist.all_gather_single(whole, own, group=self._group, async_op=True))
            self.received_bytes += whole.nbytes - own.nbytes
        while works:  # a work holds its tensors
            works.pop(0).wait()
        shard = {}
        for param in self._rank.params:
            whole = wholes.pop(param.name)[: prod(param.shape)].view(param.shape)
            if param.name in self._chunks:
                shard[param.name] = param.shard(whole, self._rank.layout.generating.t, self._index).clone()
        return shard

    def expected(self) -> dict[str, Tensor]:
        """What `gather` must give: every section in one piece."""
        mine = [param for param in self._rank.params if param.name in self._chunks]
        return {
            q.name: q.shard(self._rank.whole(q), self._rank.layout.generating.t, self._index) for q in mine
        }


def _group(groups: list[list[int]]) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration(groups)
    assert group is not None
    return group
