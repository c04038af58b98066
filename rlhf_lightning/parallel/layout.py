"""The layouts of one model's ranks for training and for generation: coordinates and groups, pure maths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Axis = Literal["p", "t", "d"]
"""A mesh axis: pipeline, tensor or data parallel."""
Order = Literal["tpd", "tdp"]
"""Axes from the fastest to the slowest: `tpd` numbers ranks as the paper does, `tdp` as Megatron does."""
Rule = Literal["hybridflow", "vanilla"]
"""How generation shards are given to ranks: HybridFlow's way, or by counting (HybridFlow-V)."""
Sharding = Literal["none", "states", "gradients", "full"]
"""What data-parallel ranks share out: nothing; optimizer states (ZeRO-1); gradients too (ZeRO-2), reduced
after every micro-batch; parameters too (ZeRO-3, FSDP)."""
GenerationAxis = Literal["p", "t", "micro"]
"""An axis of a generation layout: pipeline, tensor, or micro data parallel."""


class Coordinate(NamedTuple):
    """Where a rank stands on each axis."""

    p: int
    t: int
    d: int


class GenerationCoordinate(NamedTuple):
    """Where a rank stands within generation."""

    p: int
    t: int
    micro: int
    """Which of the dg copies within its training replica."""
    d: int


@dataclass(frozen=True)
class Generation:
    """The shards in which the actor generates.

    Raises:
        ValueError: a size is below 1.
    """

    p: int = 1
    """Pipeline stages, pg."""
    t: int = 1
    """Tensor shards, tg."""
    rule: Rule = "hybridflow"
    """Which rank holds which shard."""

    def __post_init__(self) -> None:
        if min(self.p, self.t) < 1:
            raise ValueError(f"Generation(p={self.p}, t={self.t}): every size is at least 1.")


@dataclass(frozen=True)
class ParallelLayout:
    """p pipeline stages x t tensor shards x d data-parallel replicas (HybridFlow section 3).

    Ranks are numbered with `t` fastest, then `p`, then `d`, as in the paper's Figure 8, unless `order` says
    otherwise.

    Raises:
        ValueError: a size is below 1, or the generation sizes do not divide those of training.
    """

    p: int = 1
    """Pipeline stages."""
    t: int = 1
    """Tensor shards."""
    d: int = 1
    """Data-parallel replicas."""
    order: Order = "tpd"
    """Axes from the fastest to the slowest."""
    generation: Generation | None = None
    """The shards in which the model generates; None: those in which it trains."""

    def __post_init__(self) -> None:
        if min(self.p, self.t, self.d) < 1:
            raise ValueError(f"ParallelLayout(p={self.p}, t={self.t}, d={self.d}): every size is at least 1.")
        if self.order not in ("tpd", "tdp"):
            raise ValueError(
                f"ParallelLayout(order={self.order!r}): type tpd (the paper's) or tdp (Megatron's)."
            )
        _ = self.generating  # refuses sizes that do not divide

    @property
    def num_ranks(self) -> int:
        """Ranks that the model occupies: p t d."""
        return self.p * self.t * self.d

    @property
    def sizes(self) -> str:
        """The sizes in words: `p1 t8 d2`."""
        return f"p{self.p} t{self.t} d{self.d}"

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of a rank of this layout, 0 <= rank < num_ranks."""
        rest, t = divmod(rank, self.t)
        if self.order == "tdp":
            p, d = divmod(rest, self.d)
        else:
            d, p = divmod(rest, self.p)
        return Coordinate(p, t, d)

    def rank(self, coordinate: Coordinate) -> int:
        """The rank at a coordinate; the inverse of `coordinate`."""
        p, t, d = coordinate
        return (p * self.d + d if self.order == "tdp" else d * self.p + p) * self.t + t

    def groups(self, axis: Axis) -> list[list[int]]:
        """The groups of ranks that differ along one axis only, each in the order of that axis."""
        return _lines([self.coordinate(rank) for rank in range(self.num_ranks)], axis)

    @property
    def replicas(self) -> list[list[int]]:
        """For each data-parallel replica its ranks, stage by stage."""
        places = [(p, t) for p in range(self.p) for t in range(self.t)]
        return [[self.rank(Coordinate(p, t, d)) for p, t in places] for d in range(self.d)]

    @property
    def output_ranks(self) -> list[int]:
        """For each data-parallel replica the rank that holds its output: last stage, first tensor shard."""
        return [self.rank(Coordinate(p=self.p - 1, t=0, d=i)) for i in range(self.d)]

    @property
    def generating(self) -> GenerationLayout:
        """The layout in which the model generates."""
        wanted = self.generation or Generation(self.p, self.t)
        return GenerationLayout(train=self, p=wanted.p, t=wanted.t, rule=wanted.rule)


@dataclass(frozen=True)
class GenerationLayout:
    """pg-tg-dg-d: the ranks of a training layout as they generate (HybridFlow section 5.1).

    Each training replica of p t ranks holds dg = p t / (pg tg) copies of the model in pg tg shards. Under
    HybridFlow's rule a rank generates with the shard that its training shard is a part of, and the ranks of a
    micro-DP group hold the parts of one generation shard; the vanilla rule numbers ranks consecutively.

    Raises:
        ValueError: tg does not divide t, or pg does not divide p.
    """

    train: ParallelLayout
    p: int = 1
    """Pipeline stages, pg."""
    t: int = 1
    """Tensor shards, tg."""
    rule: Rule = "hybridflow"
    """Which rank holds which shard."""

    def __post_init__(self) -> None:
        _check_divides("p", self.train.p, self.p)
        _check_divides("t", self.train.t, self.t)

    @property
    def num_micro(self) -> int:
        """dg: copies of the model within a training replica."""
        return self.train.p * self.train.t // (self.p * self.t)

    @property
    def sizes(self) -> str:
        """The sizes within a training replica in words: `pg1 tg2 dg4`."""
        return f"pg{self.p} tg{self.t} dg{self.num_micro}"

    @property
    def num_replicas(self) -> int:
        """Copies of the model that answer different prompts: dg d."""
        return self.num_micro * self.train.d

    @property
    def copy_layout(self) -> ParallelLayout:
        """The layout of one copy by itself: pg stages x tg shards."""
        return ParallelLayout(p=self.p, t=self.t)

    def coordinate(self, rank: int) -> GenerationCoordinate:
        """Where a rank of the training layout stands in generation."""
        train = self.train.coordinate(rank)
        if self.rule == "vanilla":
            rest, t = divmod(train.p * self.train.t + train.t, self.t)
            micro, p = divmod(rest, self.p)
            return GenerationCoordinate(p, t, micro, train.d)
        p, micro_p = divmod(train.p, self.train.p // self.p)
        t, micro_t = divmod(train.t, self.train.t // self.t)
        return GenerationCoordinate(p, t, micro_p * (self.train.t // self.t) + micro_t, train.d)

    def rank(self, coordinate: GenerationCoordinate) -> int:
        """The rank at a coordinate; the inverse of `coordinate`."""
        return next(r for r in range(self.train.num_ranks) if self.coordinate(r) == coordinate)

    def replica(self, rank: int) -> int:
        """Which of the dg d copies a rank belongs to: d dg + micro."""
        at = self.coordinate(rank)
        return at.d * self.num_micro + at.micro

    def groups(self, axis: GenerationAxis) -> list[list[int]]:
        """The groups of ranks that differ along one axis only, each in the order of that axis."""
        return _lines([self.coordinate(rank) for rank in range(self.train.num_ranks)], axis)

    @property
    def output_ranks(self) -> list[int]:
        """For each copy the rank that hands its answers over: first stage, first tensor shard."""
        firsts = [r for r in range(self.train.num_ranks) if self.coordinate(r)[:2] == (0, 0)]
        return sorted(firsts, key=self.replica)


def _lines(
    places: Sequence[Coordinate | GenerationCoordinate], axis: Axis | GenerationAxis
) -> list[list[int]]:
    """The groups of ranks, given where each stands, that differ along one axis only."""
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for rank, at in enumerate(places):
        p, t, *micro, d = at._replace(**{axis: 0})
        found.setdefault((d, *micro, p, t), []).append((getattr(at, axis), rank))
    return [[rank for _, rank in sorted(members)] for _, members in sorted(found.items())]


def _check_divides(axis: str, training: int, generation: int) -> None:
    if generation < 1 or training % generation:
        fitting = [str(n) for n in range(1, training + 1) if training % n == 0]
        raise ValueError(
            f"layout (train {axis}={training}, generate {axis}={generation}): generate {axis} must divide "
            f"train {axis}. Try generate {axis}={' or '.join(fitting)}."
        )
