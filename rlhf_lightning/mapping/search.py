"""The best mapping of models to devices: HybridFlow section 6, Algorithm 1, solved exactly.

for every placement: which models share devices       `set_partitions`: 15 for four models, 203 for six
    for every allocation: devices of each set         `allocate`
        for every layout of every model of a set      `AutoParallel`
Layouts are computed only where they matter: a set of models first counts with its ideal seconds, a lower
bound, and gets layouts once an allocation has chosen it; then the allocation is repeated. Placements that
differ by models of equal cost alone are searched once, and one whose lower bound is above the mappings found
so far is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlhf_lightning.mapping.allocate import Choices, allocate
from rlhf_lightning.mapping.auto_parallel import AutoParallel, Point
from rlhf_lightning.mapping.costs import Costs
from rlhf_lightning.mapping.partitions import set_partitions
from rlhf_lightning.parallel.layout import ParallelLayout

Sets = tuple[tuple[str, ...], ...]
"""A placement (the paper's plm): the sets of models that share devices."""


@dataclass(frozen=True)
class DeviceKind:
    """The devices of one kind in a cluster, which may have several kinds."""

    costs: Costs
    """What the models cost on them."""
    devices: int
    """How many there are."""
    sizes: tuple[int, ...]
    """Numbers of devices that a set of models can get."""


@dataclass(frozen=True)
class Pool:
    """A set of models on the devices that they share."""

    roles: tuple[str, ...]
    devices: int
    layouts: tuple[ParallelLayout, ...]
    """One for each role, in the order of `roles`."""
    seconds: tuple[float, ...]
    """Seconds of each stage: the sum over its models."""
    kind: int = 0
    """Index of its kind of devices."""

    @cached_property
    def at(self) -> dict[str, ParallelLayout]:
        """The layout of each role."""
        return dict(zip(self.roles, self.layouts, strict=True))


@dataclass(frozen=True)
class DeviceMapping:
    """Every model on its devices in its layout."""

    pools: tuple[Pool, ...]

    @property
    def stages(self) -> tuple[float, ...]:
        """Seconds of each stage, those of its slowest pool: c in the paper's d_cost."""
        return tuple(max(column) for column in zip(*(pool.seconds for pool in self.pools), strict=True))

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return sum(self.stages)


@dataclass(frozen=True)
class _Choice:
    """Devices that a set could get, and layouts on them."""

    kind: int
    """Index of the kind of devices."""
    devices: int
    point: Point | None
    """The models' layouts; None where only ideal seconds are known so far."""


class Search:
    """Finds the best mappings of some models on a cluster.

    Args:
        kinds: the cluster's devices, by kind; all devices of a set of models are of one kind.
        roles: the models.
    """

    def __init__(self, kinds: Sequence[DeviceKind], roles: Sequence[str]) -> None:
        self.kinds, self.roles = tuple(kinds), tuple(roles)
        self.layouts = [AutoParallel(kind.costs) for kind in kinds]

    def best(self, count: int = 1) -> list[DeviceMapping]:
        """The best mappings of the `count` best placements, fastest first; empty where nothing fits."""
        found: list[DeviceMapping] = []
        for _, sets in sorted(self._placements(), key=lambda entry: entry[0]):
            bound = found[count - 1].seconds if len(found) >= count else math.inf
            mapping = self.best_of(sets, bound)
            if mapping is not None:
                found = sorted([*found, mapping], key=lambda m: m.seconds)[:count]
        return found

    def _placements(self) -> list[tuple[float, Sets]]:
        """Placements that can fit, each with its lower bound in seconds; one of those with equal costs."""
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

    def best_of(self, sets: Sets, bound: float = math.inf) -> DeviceMapping | None:
        """The best mapping of one placement; None where it does not fit, or takes `bound` seconds or more."""
        available = [kind.devices for kind in self.kinds]
        while True:
            tables = [self._choices(roles) for roles in sets]
            if not all(len(choices.devices) for choices, _ in tables):
                return None
            found = allocate([choices for choices, _ in tables], available, bound)
            if found is None:
                return None
            chosen = [given[i] for (_, given), i in zip(tables, found[1], strict=True)]
            pools = [self._pool(roles, one) for roles, one in zip(sets, chosen, strict=True)]
            if all(pools):
                return DeviceMapping(tuple(pool for pool in pools if pool is not None))
            for roles, one in zip(sets, chosen, strict=True):
                self.layouts[one.kind].front(roles, one.devices)

    def _pool(self, roles: Sequence[str], choice: _Choice) -> Pool | None:
        """The pool of a choice; None where its layouts are not known yet."""
        point = choice.point
        if point is None:
            return None
        ordered = self.layouts[choice.kind].ordered(roles)
        return Pool(ordered, choice.devices, point.layouts, point.seconds, choice.kind)

    def _choices(self, roles: Sequence[str]) -> tuple[Choices, list[_Choice]]:
        """What a set could get, as arrays for `allocate` and one by one: known fronts, else ideal seconds."""
        found: list[_Choice] = []
        rows: list[Sequence[float]] = []
        for number, (kind, layouts) in enumerate(zip(self.kinds, self.layouts, strict=True)):
            for size in kind.sizes:
                front = layouts.cached_front(roles, size)
                ideal = layouts.ideal(roles, size) if front is None else None
                for point in front or ():
                    found.append(_Choice(number, size, point))
                    rows.append(point.seconds)
                if ideal is not None:
                    found.append(_Choice(number, size, None))
                    rows.append(list(ideal))
        devices = np.zeros((len(rows), len(self.kinds)), np.int64)
        for i, one in enumerate(found):
            devices[i, one.kind] = one.devices
        width = len(rows[0]) if rows else 0
        return Choices(devices, np.array(rows).reshape(len(rows), width)), found
