"""How one model's parameters are divided: over pipeline stages by layer, over tensor ranks along a dimension.

linear_fc1 [2 F, H], sections (F, F), t = 2      rank 0: gate 0..F/2, up 0..F/2      rank 1: the other halves
linear_fc2 [H, F], dim 1, t = 2                  rank 0: columns 0..F/2              rank 1: the others
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor

Place = int | Literal["first", "last", "ends"]
"""The layer of a parameter; or the first stage, the last stage, or both (a tied embedding)."""


@dataclass(frozen=True)
class Sharded:
    """A parameter of the whole model, and how it is divided."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter; a vocabulary with its padding."""
    place: Place
    """Which stages hold it."""
    dim: int | None = None
    """Dimension that tensor parallelism divides; None: every tensor rank has it whole."""
    sections: tuple[int, ...] = ()
    """Sizes along `dim` of what is fused, each divided by itself: all of it; empty for one section."""

    @property
    def numel(self) -> int:
        """Numbers in the whole parameter."""
        return prod(self.shape)

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes along `dim` of what is divided by itself; none where nothing is divided."""
        return () if self.dim is None else self.sections or (self.shape[self.dim],)

    def intervals(self, t: int, index: int) -> list[tuple[int, int]]:
        """What tensor rank `index` of `t` holds along `dim`: [start, stop) of each section, in order.

        Raises:
            ValueError: t does not divide a section.
        """
        found, start = [], 0
        for size in self.parts:
            if size % t:
                raise ValueError(f"{self.name}: {size} along dimension {self.dim} is not divisible by t={t}.")
            found.append((start + size * index // t, start + size * (index + 1) // t))
            start += size
        return found

    def shard_shape(self, t: int) -> tuple[int, ...]:
        """Shape of one tensor rank's part."""
        return tuple(n // t if i == self.dim else n for i, n in enumerate(self.shape))

    def shard(self, whole: Tensor, t: int, index: int) -> Tensor:
        """The part of tensor rank `index` of `t`, a copy where it is not one piece of memory."""
        if self.dim is None:
            return whole
        pieces = [whole.narrow(self.dim, a, b - a) for a, b in self.intervals(t, index)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def whole(self, shards: Sequence[Tensor]) -> Tensor:
        """The parameter put together from the parts of all tensor ranks, in their order."""
        if self.dim is None:
            return shards[0]
        split = [shard.split([n // len(shards) for n in self.parts], dim=self.dim) for shard in shards]
        return torch.cat([piece for section in zip(*split, strict=True) for piece in section], dim=self.dim)


def indivisible(t: int, *, heads: int, groups: int, head_size: int, inner: int) -> str:
    """Why t tensor ranks cannot share a layer evenly; empty if they can.

    Args:
        t: tensor ranks.
        heads: of attention.
        groups: key-value heads.
        head_size: numbers of one head.
        inner: columns of the feed-forward part.
    """
    rows = (heads + 2 * groups) * head_size
    if heads % t:
        return f"t does not divide the {heads} attention heads"
    if inner % t:
        return f"t does not divide the {inner} columns of the feed-forward layers"
    if groups % t and t % groups:
        return f"t neither divides the {groups} key-value heads nor is a multiple of them"
    return f"t does not divide the {rows} rows of the fused query, key and value" if rows % t else ""


def even_stages(num_layers: int, p: int, *, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Layers of each stage, in order; a stage of an interleaved pipeline has `chunks` runs of layers.

    Where the layers do not divide, the first stages have one more.

    Raises:
        ValueError: there are more stages than layers.
    """
    if p * chunks > num_layers:
        if chunks == 1 or num_layers >= 2 * chunks:
            instead = f"p={num_layers // chunks}"
        else:  # one stage is not interleaved
            instead = f"chunks={num_layers // p}" if p <= num_layers else f"p={num_layers}, chunks=1"
        raise ValueError(
            f"p={p} stages of {chunks} chunks for {num_layers} layers: a chunk would be empty. Try {instead}."
        )
    size, more = divmod(num_layers, p * chunks)
    firsts = [i * size + min(i, more) for i in range(p * chunks + 1)]
    runs = [range(a, b) for a, b in pairwise(firsts)]
    return tuple(tuple(layer for run in runs[stage::p] for layer in run) for stage in range(p))


def holds(param: Sharded, stages: Sequence[Sequence[int]], stage: int) -> bool:
    """Whether a stage has a parameter."""
    last = len(stages) - 1
    if isinstance(param.place, int):
        return param.place in stages[stage]
    return stage in {"first": (0,), "last": (last,), "ends": (0, last)}[param.place]
