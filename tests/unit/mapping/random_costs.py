"""Random simulators: bytes and seconds of a handful of layouts, drawn once for a model and a device count."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from rlhf_lightning.mapping.partitions import divisors
from rlhf_lightning.parallel.layout import Generation, ParallelLayout


@dataclass(frozen=True)
class Entry:
    """One layout of one model."""

    layout: ParallelLayout
    resident: float
    working: float
    seconds: tuple[float, ...]
    thirst: float
    """Seconds of the first stage, divided by the bytes that are left for them; 0 for a model without."""


@dataclass
class RandomCosts:
    """Costs in which nothing is smooth: layouts trade memory for seconds, stages for each other."""

    seed: int
    roles: tuple[str, ...]
    num_layouts: int
    twins: bool
    """Whether the last two models cost the same."""
    capacity: float = 10.0
    writers: int = 1
    """How many of the models generate: the first ones."""
    table: dict[tuple[Hashable, int], list[Entry]] = field(default_factory=dict)

    @property
    def elastic(self) -> frozenset[str]:
        return frozenset(self.roles[: self.writers])

    def signature(self, role: str) -> Hashable:
        twin = self.twins and len(self.roles) > 2 and role == self.roles[-1]
        return self.roles[-2] if twin else role

    def entries(self, role: str, devices: int) -> list[Entry]:
        key = (self.signature(role), devices)
        if key not in self.table:
            draw = random.Random(f"{self.seed} {key}")  # noqa: S311
            size = random.Random(f"{self.seed} {key[0]}").uniform(2, 30)  # noqa: S311
            layouts = [
                ParallelLayout(p, t, devices // (p * t), generation=sizes)
                for p in divisors(devices)
                for t in divisors(devices // p)
                for sizes in ([Generation(p, t), Generation(1, t)] if role in self.elastic else [None])
            ]
            chosen = draw.sample(layouts, min(self.num_layouts, len(layouts)))
            self.table[key] = [self._entry(layout, role, size, draw) for layout in chosen]
        return self.table[key]

    def _entry(self, layout: ParallelLayout, role: str, size: float, draw: random.Random) -> Entry:
        """What is resident depends on the training layout alone."""
        devices = layout.num_ranks
        trains = random.Random(f"{self.seed} {size} {layout.p} {layout.t} {devices}")  # noqa: S311
        works = [i for i in range(3) if draw.random() < 0.7] or [1]
        seconds = tuple(
            size * draw.uniform(0.3, 3) / devices ** draw.uniform(0, 1) if i in works else 0.0
            for i in range(3)
        )
        return Entry(
            layout,
            resident=size * trains.uniform(0.2, 1.5) / devices ** trains.uniform(0.3, 1),
            working=draw.uniform(0, 2),
            seconds=seconds,
            thirst=draw.uniform(0, 20) if role in self.elastic else 0.0,
        )

    def _of(self, role: str, layout: ParallelLayout) -> Entry:
        return next(e for e in self.entries(role, layout.num_ranks) if e.layout == layout)

    def layouts(self, role: str, devices: int) -> Sequence[ParallelLayout]:
        return [entry.layout for entry in self.entries(role, devices)]

    def resident(self, role: str, layout: ParallelLayout) -> float:
        return self._of(role, layout).resident

    def working(self, role: str, layout: ParallelLayout) -> float:
        return self._of(role, layout).working

    def seconds(self, role: str, layout: ParallelLayout, free: float) -> Sequence[float]:
        entry = self._of(role, layout)
        if not entry.thirst:
            return entry.seconds
        longer = entry.thirst / free if free > 0.1 else math.inf
        return (entry.seconds[0] + longer, *entry.seconds[1:])
