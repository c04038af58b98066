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
class Kind:
    """Equal devices of a cluster, which may have others too."""

    costs: Costs
    """Bytes and seconds on them."""
    devices: int
    """How many there are."""
    sizes: tuple[int, ...]
    """How many of them a set can have."""


@dataclass(frozen=True)
class Pool:
    """Models that share devices."""

    roles: tuple[str, ...]
    devices: int
    layouts: tuple[Layout, ...]
    """Of the roles."""
    seconds: tuple[float, ...]
    """Of all its models together, in each stage."""
    kind: int = 0
    """Which kind of devices."""


@dataclass(frozen=True)
class DeviceMapping:
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


@dataclass(frozen=True)
class _Choice:
    """What a set can be given."""

    kind: int
    devices: int
    point: Point | None
    """None for an ideal, whose layouts are not known yet."""


class Search:
    """Finds the best mappings of some models on a cluster.

    Args:
        kinds: of its devices; a set of models has devices of one kind.
        roles: the models.
    """

    def __init__(self, kinds: Sequence[Kind], roles: Sequence[str]) -> None:
        self.kinds, self.roles = tuple(kinds), tuple(roles)
        self.layouts = [AutoParallel(kind.costs) for kind in kinds]

    def best(self, count: int = 1) -> list[DeviceMapping]:
        """The best mapping and the best ones that share devices in another way; empty where nothing fits."""
        found: list[DeviceMapping] = []
        for _, sets in sorted(self._promising(), key=lambda entry: entry[0]):
            bound = found[count - 1].seconds if len(found) >= count else math.inf
            mapping = self.of(sets, bound)
            if mapping is not None:
                found = sorted([*found, mapping], key=lambda m: m.seconds)[:count]
        return found

    def _promising(self) -> list[tuple[float, Sets]]:
        """Partitions that can fit, each with seconds that it cannot beat; one of those that cost the same."""
        seen: dict[tuple[object, ...], tuple[float, Sets]] = {}
        for sets in set_partitions(self.roles):
            key = tuple(sorted(tuple(layouts.key(roles) for layouts in self.layouts) for roles in sets))
            if key in seen:
                continue
            choices = [self._choices(roles)[0] for roles in sets]
            bound = math.inf
            if all(len(choice.devices) for choice in choices):
                bound = float(np.max([choice.seconds.min(axis=0) for choice in choices], axis=0).sum())
            seen[key] = (bound, sets)
        return [entry for entry in seen.values() if math.isfinite(entry[0])]

    def of(self, sets: Sets, bound: float = math.inf) -> DeviceMapping | None:
        """The best mapping in which these models share devices; None where it does not fit, or not below."""
        there = [kind.devices for kind in self.kinds]
        while True:
            tables = [self._choices(roles) for roles in sets]
            if not all(len(choices.devices) for choices, _ in tables):
                return None
            found = allocate([choices for choices, _ in tables], there, bound)
            if found is None:
                return None
            chosen = [given[i] for (_, given), i in zip(tables, found[1], strict=True)]
            pools = [self._pool(roles, one) for roles, one in zip(sets, chosen, strict=True)]
            if all(pools):
                return DeviceMapping(tuple(pool for pool in pools if pool is not None))
            for roles, one in zip(sets, chosen, strict=True):
                self.layouts[one.kind].front(roles, one.devices)

    def _pool(self, roles: Sequence[str], choice: _Choice) -> Pool | None:
        """The pool of a choice; None where its layouts are not known."""
        point = choice.point
        if point is None:
            return None
        ordered = self.layouts[choice.kind].ordered(roles)
        return Pool(ordered, choice.devices, point.layouts, point.seconds, choice.kind)

    def _choices(self, roles: Sequence[str]) -> tuple[Choices, list[_Choice]]:
        """What a set can be given: known fronts, and ideals (without a point) for the rest."""
        given: list[_Choice] = []
        rows: list[Sequence[float]] = []
        for number, (kind, layouts) in enumerate(zip(self.kinds, self.layouts, strict=True)):
            for size in kind.sizes:
                front = layouts.known(roles, size)
                ideal = layouts.ideal(roles, size) if front is None else None
                for point in front or ():
                    given.append(_Choice(number, size, point))
                    rows.append(point.seconds)
                if ideal is not None:
                    given.append(_Choice(number, size, None))
                    rows.append(list(ideal))
        devices = np.zeros((len(rows), len(self.kinds)), np.int64)
        for i, one in enumerate(given):
            devices[i, one.kind] = one.devices
        width = len(rows[0]) if rows else 0
        return Choices(devices, np.array(rows).reshape(len(rows), width)), given
