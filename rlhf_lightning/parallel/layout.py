"""The layout (p, t, d) of one model's ranks: coordinates and groups, pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

Axis = Literal["p", "t", "d"]
"""A mesh axis: pipeline, tensor or data parallel."""


class Coordinate(NamedTuple):
    """Where a rank stands on each axis."""

    p: int
    t: int
    d: int


@dataclass(frozen=True)
class ParallelLayout:
    """p pipeline stages x t tensor shards x d data-parallel replicas (HybridFlow section 3).

    Ranks are numbered with `t` fastest, then `p`, then `d`, as in the paper's Figure 8.

    Raises:
        ValueError: a size is below 1.
    """

    p: int = 1
    """Pipeline stages."""
    t: int = 1
    """Tensor shards."""
    d: int = 1
    """Data-parallel replicas."""

    def __post_init__(self) -> None:
        if min(self.p, self.t, self.d) < 1:
            raise ValueError(f"ParallelLayout(p={self.p}, t={self.t}, d={self.d}): every size is at least 1.")

    @property
    def num_ranks(self) -> int:
        """Ranks that the model occupies: p t d."""
        return self.p * self.t * self.d

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of a rank of this layout, 0 <= rank < num_ranks."""
        return Coordinate(p=rank // self.t % self.p, t=rank % self.t, d=rank // (self.t * self.p))

    def rank(self, coordinate: Coordinate) -> int:
        """The rank at a coordinate; the inverse of `coordinate`."""
        return (coordinate.d * self.p + coordinate.p) * self.t + coordinate.t

    def groups(self, axis: Axis) -> list[list[int]]:
        """The groups of ranks that differ along one axis only, each in the order of that axis."""
        sizes = {"p": self.p, "t": self.t, "d": self.d}
        fixed = [name for name in ("d", "p", "t") if name != axis]
        result = []
        for place in product(*(range(sizes[name]) for name in fixed)):
            at = dict(zip(fixed, place, strict=True))
            result.append([self.rank(Coordinate(**{**at, axis: i})) for i in range(sizes[axis])])
        return result

    @property
    def output_ranks(self) -> list[int]:
        """For each data-parallel replica the rank that holds its output: last stage, first tensor shard."""
        return [self.rank(Coordinate(p=self.p - 1, t=0, d=i)) for i in range(self.d)]
