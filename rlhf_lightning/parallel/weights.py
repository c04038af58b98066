"""All parameters of a model, and what each rank of a layout holds of them, in training and in generation.

A shard maps a parameter's name to the intervals that are held of it: of the dimension that tensor parallelism
divides, or of the flattened parameter where it divides none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Protocol

from rlhf_lightning.parallel.intervals import Interval
from rlhf_lightning.parallel.layout import GenerationLayout, ParallelLayout
from rlhf_lightning.parallel.sharding import Sharded, even_stages, holds

Bytes = int | Fraction
"""Bytes; a fraction only where a model is known by its size alone and does not divide."""
Shard = dict[str, list[Interval]]
"""What a rank holds of each parameter: intervals by the parameter's name."""
Stages = tuple[tuple[int, ...], ...]
"""Layers of each training stage."""


class Sized(Protocol):
    """What has a size in bytes."""

    @property
    def size_bytes(self) -> Bytes:
        """Size in bytes."""


@dataclass(frozen=True)
class Slice:
    """A piece of one parameter."""

    name: str
    """Name of the parameter."""
    dim: int | None
    """Dimension that `start` and `stop` count along; None: the flattened parameter."""
    start: int
    stop: int
    size_bytes: Bytes


@dataclass(frozen=True)
class Weights:
    """The weights of a model, as plans move them.

    Raises:
        ValueError: a parameter's layer is on no stage or on two.
    """

    parameters: tuple[Sharded, ...]
    """All of the model."""
    stages: Stages
    """Layers of each training stage."""
    element_bytes: Bytes = 2
    """Size of a number; 2 for bf16."""

    def __post_init__(self) -> None:
        placed = [layer for stage in self.stages for layer in stage]
        layers = sorted({param.place for param in self.parameters if isinstance(param.place, int)})
        if wrong := [layer for layer in layers if placed.count(layer) != 1]:
            raise ValueError(
                f"layer {wrong[0]} is on {placed.count(wrong[0])} of the stages {self.stages}. "
                f"Place each of the layers {layers[0]} to {layers[-1]} once."
            )

    @classmethod
    def opaque(cls, size_bytes: int, layout: ParallelLayout) -> Weights:
        """A model of so many bytes of which nothing else is known: every share of it is exact.

        It is one parameter a stage, of a length that p t ranks, p t d ranks and any generation divide.
        """
        length = layout.num_ranks
        params = tuple(Sharded(f"stage {p}", (length,), p, 0) for p in range(layout.p))
        return cls(params, even_stages(layout.p, layout.p), exact(Fraction(size_bytes, layout.p * length)))

    @cached_property
    def by_name(self) -> Mapping[str, Sharded]:
        """The parameters by name."""
        return {param.name: param for param in self.parameters}

    @property
    def size_bytes(self) -> Bytes:
        """Bytes of the whole model."""
        return exact(sum(param.numel for param in self.parameters) * self.element_bytes)

    def training(self, layout: ParallelLayout, rank: int) -> Shard:
        """What a rank trains."""
        at = layout.coordinate(rank)
        return self._shard(self.stages, stage=at.p, t=layout.t, index=at.t)

    def generation(self, generating: GenerationLayout, rank: int) -> Shard:
        """What a rank generates with."""
        at = generating.coordinate(rank)
        stages = generation_stages(self.stages, generating.p)
        return self._shard(stages, stage=at.p, t=generating.t, index=at.t)

    def flat_part(self, count: int, index: int) -> Shard:
        """Part `index` of `count` of every parameter, flattened: how ZeRO-3 divides them."""
        cut = {p.name: (p.numel * index // count, p.numel * (index + 1) // count) for p in self.parameters}
        return {name: [interval] for name, interval in cut.items() if interval[0] < interval[1]}

    def slices(self, shard: Shard, *, flat: bool = False) -> list[Slice]:
        """A shard as pieces with their bytes.

        Args:
            shard: of this model.
            flat: whether its intervals are of the flattened parameters.
        """
        found = []
        for name, intervals in shard.items():
            param = self.by_name[name]
            dim = None if flat else param.dim
            rows = param.numel if dim is None else param.shape[dim]
            row_bytes = param.numel // rows * self.element_bytes
            found += [Slice(name, dim, a, b, exact((b - a) * row_bytes)) for a, b in intervals]
        return found

    def _shard(self, stages: Stages, *, stage: int, t: int, index: int) -> Shard:
        return {
            param.name: [(0, param.numel)] if param.dim is None else param.intervals(t, index)
            for param in self.parameters
            if holds(param, stages, stage)
        }


def generation_stages(stages: Sequence[Sequence[int]], count: int) -> Stages:
    """Layers of each generation stage, in order: those of as many neighbouring training stages each.

    Of an interleaved pipeline a stage has several runs of layers, and a token passes it as often.
    """
    size = len(stages) // count
    return tuple(
        tuple(sorted(layer for stage in stages[first : first + size] for layer in stage))
        for first in range(0, len(stages), size)
    )


def total(parts: Iterable[Sized]) -> Bytes:
    """Total bytes."""
    return exact(sum(part.size_bytes for part in parts))


def exact(size: Bytes) -> Bytes:
    """The same number, as an int where it is whole."""
    return size.numerator if size.denominator == 1 else size
