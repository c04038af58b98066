"""The best mapping of models to devices (HybridFlow section 6, Algorithm 1), exactly.

for every set partition of the models         15 for four, 203 for six; equal models are interchangeable
    for every allocation of devices           `allocate`, on the ideal seconds of each set at first
        for every layout of every model       `auto_parallel`, for what an allocation has chosen; then again
A partition whose ideal is beaten by the mappings found so far is left at that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_lightning.mapping.allocate import Choices, allocate
from rlhf_lightning.mapping.auto_parallel import AutoParallel, Point
from rlhf_lightning.mapping.costs import Costs, Layout
from rlhf_lightning.mapping.partitions import set_partitions

Sets = tuple[tuple[str, ...], ...]
"""Which models share devices."""


@dataclass(frozen=True)
class Pool:
    """Models that share devices."""

    roles: tuple[str, ...]
    devices: int
    layouts: tuple[Layout, ...]
    """Of the roles."""
    seconds: tuple[float, ...]
    """Of all its models together, in each stage."""


@dataclass(frozen=True)
class Mapping:
    """Every model on its devices in its layout."""

    pools: tuple[Pool, ...]

    @property
    def stages(self) -> tuple[float, ...]:
        """Seconds of each stage: those of the slowest pool."""
        return tuple(max(column) for column in zip(*(pool.seconds for pool in self.pools), strict=True))

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        return sum(self.stages)


class Search:
    """Finds the best mappings of some models on a number of devices.

    Args:
        costs: bytes and seconds.
        roles: the models.
        devices: how many devices there are.
        sizes: how many of them a set can have.
    """

    def __init__(self, costs: Costs, roles: Sequence[str], devices: int, *, sizes: Sequence[int]) -> None:
        self.costs, self.roles, self.devices, self.sizes = costs, tuple(roles), devices, tuple(sizes)
        self.layouts = AutoParallel(costs)

    def best(self, count: int = 1) -> list[Mapping]:
        """The best mapping and the best ones that share devices in another way; empty where nothing fits."""
        found: list[Mapping] = []
        for _, sets in sorted(self._promising(), key=lambda entry: entry[0]):
            bound = found[count - 1].seconds if len(found) >= count else math.inf
            mapping = self.of(sets, bound)
            if mapping is not None:
                found = sorted([*found, mapping], key=lambda m: m.seconds)[:count]
        return found

    def _promising(self) -> list[tuple[float, Sets]]:
        """Partitions that can fit, each with seconds that it cannot beat; one of those that cost the same."""
        seen: dict[tuple[tuple[int, ...], ...], tuple[float, Sets]] = {}
        for sets in set_partitions(self.roles):
            key = tuple(sorted(self.layouts.key(roles) for roles in sets))
            if key in seen:
                continue
            choices = [self._choices(roles)[0] for roles in sets]
            bound = math.inf
            if all(len(choice.devices) for choice in choices):
                bound = float(np.max([choice.seconds.min(axis=0) for choice in choices], axis=0).sum())
            seen[key] = (bound, sets)
        return [entry for entry in seen.values() if math.isfinite(entry[0])]

    def of(self, sets: Sets, bound: float = math.inf) -> Mapping | None:
        """The best mapping in which these models share devices; None where it does not fit, or not below."""
        while True:
            tables = [self._choices(roles) for roles in sets]
            if not all(len(choices.devices) for choices, _ in tables):
                return None
            chosen = allocate([choices for choices, _ in tables], self.devices, bound)
            if chosen is None:
                return None
            points = [points[i] for (_, points), i in zip(tables, chosen[1], strict=True)]
            sizes = [int(choices.devices[i]) for (choices, _), i in zip(tables, chosen[1], strict=True)]
            if all(point is not None for point in points):
                return Mapping(
                    tuple(
                        Pool(self.layouts.ordered(roles), size, point.layouts, point.seconds)
                        for roles, size, point in zip(sets, sizes, points, strict=True)
                        if point is not None
                    )
                )
            for roles, size in zip(sets, sizes, strict=True):
                self.layouts.front(roles, size)

    def _choices(self, roles: Sequence[str]) -> tuple[Choices, list[Point | None]]:
        """What a set can be given: known fronts, and ideals (without a point) for the rest."""
        sizes: list[int] = []
        rows: list[Sequence[float]] = []
        points: list[Point | None] = []
        for size in self.sizes:
            front = self.layouts.known(roles, size)
            ideal = self.layouts.ideal(roles, size) if front is None else None
            for point in front or ():
                sizes.append(size)
                rows.append(point.seconds)
                points.append(point)
            if ideal is not None:
                sizes.append(size)
                rows.append(list(ideal))
                points.append(None)
        width = len(rows[0]) if rows else 0
        return Choices(np.array(sizes, np.int64), np.array(rows).reshape(len(rows), width)), points
