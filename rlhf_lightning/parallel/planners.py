"""The three ways from training to generation that the paper compares (HybridFlow section 5.4, Table 2).

               trains                     gathers                among               volume of a rank
DeepSpeedChat  1/(tpd) of each tensor    everything             all t p d ranks     (tpd - 1)/(tpd) M
HybridFlowV    its shard of (p, t)        everything             a replica, t p      (tp - 1)/(tp) M
HybridFlow     its shard of (p, t)        its generation shard   a micro-DP group    (tp - tg pg)/(tg pg tp) M
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple

from rlhf_lightning.parallel.layout import ParallelLayout, Rule
from rlhf_lightning.parallel.weights import Bytes, Shard, Weights, exact

PlannerName = Literal["hybridflow", "vanilla", "deepspeed-chat"]
"""What a planner is called on the command line."""


class Overhead(NamedTuple):
    """What the transition costs a rank, in bytes."""

    volume: Bytes
    """Received."""
    peak: Bytes
    """Parameters that it holds at once, at most."""
    redundant: Bytes
    """Of its training shard, beside the generation shard."""


class Planner(ABC):
    """One way to generation: ranks of a group gather all that they hold, and keep their generation shards."""

    name: ClassVar[PlannerName]
    rule: ClassVar[Rule] = "vanilla"
    """How ranks are grouped in generation."""
    flat: ClassVar[bool] = False
    """Whether a rank trains pieces of flattened parameters, in memory that generation has no use for."""

    @abstractmethod
    def groups(self, layout: ParallelLayout) -> list[list[int]]:
        """Ranks that gather what all of them hold."""

    @abstractmethod
    def table(self, size_bytes: Bytes, layout: ParallelLayout) -> Overhead:
        """What Table 2 of the paper says of the worst rank, for a model of so many bytes."""

    def training(self, weights: Weights, layout: ParallelLayout, rank: int) -> Shard:
        """What a rank holds in training."""
        return weights.training(layout, rank)


class ZeROGather(Planner):
    """Training sharded by ZeRO-3: all ranks gather everything, and keep what they generate with."""

    name = "deepspeed-chat"
    flat = True

    def groups(self, layout: ParallelLayout) -> list[list[int]]:
        """All ranks."""
        return [list(range(layout.num_ranks))]

    def training(self, weights: Weights, layout: ParallelLayout, rank: int) -> Shard:
        """A piece of each flattened parameter."""
        return weights.flat_part(layout.num_ranks, rank)

    def table(self, size_bytes: Bytes, layout: ParallelLayout) -> Overhead:
        """(tpd - 1)/(tpd) M, M, M/(tpd)."""
        part = Fraction(size_bytes, layout.num_ranks)
        return Overhead(exact(size_bytes - part), size_bytes, exact(part))


class HybridFlowV(Planner):
    """The ranks of a training replica gather everything, and each keeps the shard that counting gives it."""

    name = "vanilla"

    def groups(self, layout: ParallelLayout) -> list[list[int]]:
        """Training replicas."""
        return layout.replicas

    def table(self, size_bytes: Bytes, layout: ParallelLayout) -> Overhead:
        """(tp - 1)/(tp) M, M, M/(tp)."""
        part = Fraction(size_bytes, layout.t * layout.p)
        return Overhead(exact(size_bytes - part), size_bytes, exact(part))


class HybridFlow(Planner):
    """The ranks of a micro-DP group hold the parts of one generation shard, and gather just that."""

    name = "hybridflow"
    rule = "hybridflow"

    def groups(self, layout: ParallelLayout) -> list[list[int]]:
        """Micro-DP groups."""
        return layout.generating.groups("micro")

    def table(self, size_bytes: Bytes, layout: ParallelLayout) -> Overhead:
        """(tp - tg pg)/(tg pg tp) M, M/(tg pg), 0."""
        shard = Fraction(size_bytes, layout.generating.t * layout.generating.p)
        part = Fraction(size_bytes, layout.t * layout.p)
        return Overhead(exact(shard - part), exact(shard), 0)


PLANNERS: dict[PlannerName, Planner] = {
    planner.name: planner for planner in (HybridFlow(), HybridFlowV(), ZeROGather())
}
"""By name, the default first."""
