"""A reshard plan as pictures: a line for each rank, which stands for the whole model, and blocks on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Literal

from rlhf_lightning.parallel.intervals import Interval, meet, minus
from rlhf_lightning.parallel.planners import PLANNERS
from rlhf_lightning.parallel.reshard import RankPlan, ReshardPlan
from rlhf_lightning.parallel.weights import Slice

Kind = Literal["redundant", "kept", "received", "dropped"]
"""What a rank does with a piece of the model."""
SIGNS: dict[Kind, str] = {"redundant": "x", "kept": "#", "received": "+", "dropped": "."}
"""A sign for each kind in text; where several pieces fall on one sign, the first kind here is shown."""
MEANING: dict[Kind, str] = {
    "kept": "kept in place",
    "received": "received",
    "redundant": "held for training alone",
    "dropped": "received and dropped",
}
WIDTH = 64
"""Most signs in a line."""


@dataclass(frozen=True)
class Block:
    """A piece of the model, whose whole length is 1."""

    kind: Kind
    start: Fraction
    stop: Fraction


class Blocks:
    """The lines of a plan for a model of which only the size is known.

    Args:
        plan: of `Weights.opaque`, whose parameters have one dimension.
    """

    def __init__(self, plan: ReshardPlan) -> None:
        lengths = [param.numel for param in plan.weights.parameters]
        names = [param.name for param in plan.weights.parameters]
        self.plan, self.length = plan, sum(lengths)
        self.offsets = dict(zip(names, accumulate(lengths, initial=0), strict=False))

    def of(self, part: RankPlan) -> Iterator[Block]:
        """The blocks of a rank; none where it never holds weights."""
        weights, generating = self.plan.weights, self.plan.layout.generating
        generated = self._line(weights.slices(weights.generation(generating, part.rank)))
        received = self._line(piece for receive in part.receives for piece in receive.slices)
        lines: dict[Kind, list[Interval]] = {
            "redundant": self._line(part.redundant),
            "kept": self._line(part.keeps),
            "received": meet(received, generated),
            "dropped": minus(received, generated),
        }
        for kind, line in lines.items():
            for start, stop in line:
                yield Block(kind, Fraction(start, self.length), Fraction(stop, self.length))

    def text(self, part: RankPlan) -> str:
        """The line of a rank as text, a sign for each part."""
        layout, flat = self.plan.layout, PLANNERS[self.plan.planner].flat
        width = min(WIDTH, layout.p * (layout.num_ranks if flat else layout.t))
        found = list(self.of(part))
        signs = []
        for index in range(width):
            start, stop = Fraction(index, width), Fraction(index + 1, width)
            here = {block.kind for block in found if block.start < stop and start < block.stop}
            signs.append(next((sign for kind, sign in SIGNS.items() if kind in here), " "))
        return "".join(signs)

    def _line(self, slices: Iterable[Slice]) -> list[Interval]:
        """Slices of parameters as intervals of the whole model, with neighbours joined."""
        joined: list[Interval] = []
        for start, stop in sorted(
            (self.offsets[s.name] + s.start, self.offsets[s.name] + s.stop) for s in slices
        ):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        return joined
