"""The best layouts of the models of one set on n devices (HybridFlow appendix C, Algorithm 2).

options(role, n)     one model's layouts that fit alone and that no other layout beats in bytes and seconds
ideal(roles, n)      a lower bound for each stage: the sum of every model's best seconds
front(roles, n)      the Pareto front of the set: a layout for every model, so that all fit together
Results are cached by what models cost, not by their names, so that equal models are laid out once.

A model is elastic where its seconds depend on the memory that the others leave: it generates, and the room
for keys and values decides how many sequences it decodes at once. The others are rigid.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from rlhf_lightning.mapping.costs import Costs
from rlhf_lightning.mapping.falling import Falling
from rlhf_lightning.mapping.pareto import Array, undominated
from rlhf_lightning.parallel.layout import ParallelLayout

_Key = tuple[int, ...]


@dataclass(frozen=True)
class Option:
    """One layout of one model."""

    layout: ParallelLayout
    resident: float
    """Bytes per device that stay through the whole iteration."""
    working: float
    """Bytes per device on top of that while the model computes."""
    seconds: tuple[float, ...]
    """Seconds in each stage; an elastic model's with all the memory that it would have alone."""


@dataclass(frozen=True)
class Point:
    """A point of a set's Pareto front: a layout for every model, and what the set then takes."""

    seconds: tuple[float, ...]
    """Seconds of the whole set in each stage."""
    layouts: tuple[ParallelLayout, ...]
    """One for each role, in the order of `AutoParallel.ordered`."""


@dataclass(frozen=True)
class _Merged:
    """Choices of an option for each of several models, one choice a row."""

    values: Array
    """[choices, 2 + stages], of all models together: bytes resident, most bytes working, seconds."""
    picks: Array
    """[choices, models]: index of each model's option."""


class AutoParallel:
    """Chooses the layouts of sets of models, and caches what it has found."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._ids: dict[Hashable, int] = {}
        self._options: dict[tuple[int, int], tuple[Option, ...]] = {}
        self._bests: dict[tuple[int, int], Array] = {}
        self._ideals: dict[tuple[_Key, int], Array | None] = {}
        self._fronts: dict[tuple[_Key, int], tuple[Point, ...]] = {}
        self._falling: dict[tuple[int, ParallelLayout], Falling] = {}

    def cost_class(self, role: str) -> int:
        """A number that models of equal cost share."""
        return self._ids.setdefault(self.costs.signature(role), len(self._ids))

    def key(self, roles: Sequence[str]) -> _Key:
        """What identifies a set in the caches: equal for sets of models of equal cost."""
        return tuple(sorted(self.cost_class(role) for role in roles))

    def ordered(self, roles: Sequence[str]) -> tuple[str, ...]:
        """The roles of a set, in the order of the layouts in its points."""
        return tuple(sorted(roles, key=self.cost_class))

    def options(self, role: str, devices: int) -> tuple[Option, ...]:
        """Layouts of a model that fit where it is alone on the devices; least memory first."""
        key = (self.cost_class(role), devices)
        if key not in self._options:
            self._options[key] = self._make_options(role, devices)
        return self._options[key]

    def _make_options(self, role: str, devices: int) -> tuple[Option, ...]:
        found = []
        for layout in self.costs.layouts(role, devices):
            resident, working = self.costs.resident(role, layout), self.costs.working(role, layout)
            if resident + working > self.costs.capacity:
                continue
            seconds = tuple(self.costs.seconds(role, layout, self.costs.capacity - resident))
            if math.isfinite(sum(seconds)):
                found.append(Option(layout, resident, working, seconds))
        if role not in self.costs.elastic and found:
            table = np.array([(o.resident, o.working, *o.seconds) for o in found])
            found = [found[i] for i in undominated(table)]
        return tuple(sorted(found, key=lambda o: o.resident + o.working))

    def min_bytes(self, roles: Sequence[str], devices: int) -> float:
        """The least bytes per device that the set can take; infinite where a model fits in no layout."""
        return min_bytes([self.options(role, devices) for role in roles])

    def ideal(self, roles: Sequence[str], devices: int) -> Array | None:
        """A lower bound of the set's seconds in each stage, [stages]; None where it does not fit."""
        key = (self.key(roles), devices)
        if key not in self._ideals:
            self._ideals[key] = self._make_ideal(roles, devices)
        return self._ideals[key]

    def _make_ideal(self, roles: Sequence[str], devices: int) -> Array | None:
        if self.min_bytes(roles, devices) > self.costs.capacity:
            return None
        ideal: Array = np.sum([self._best(role, devices) for role in roles], axis=0)
        return ideal

    def _best(self, role: str, devices: int) -> Array:
        """The least seconds of a model in each stage, [stages], each in the layout that is best for it."""
        key = (self.cost_class(role), devices)
        if key not in self._bests:
            self._bests[key] = np.array([o.seconds for o in self.options(role, devices)]).min(axis=0)
        return self._bests[key]

    def cached_front(self, roles: Sequence[str], devices: int) -> tuple[Point, ...] | None:
        """The front, if it was computed before; else None."""
        return self._fronts.get((self.key(roles), devices))

    def front(self, roles: Sequence[str], devices: int) -> tuple[Point, ...]:
        """The Pareto front of a set: layouts that fit together and that no others beat in every stage."""
        key = (self.key(roles), devices)
        if key not in self._fronts:
            self._fronts[key] = self._make_front(self.ordered(roles), devices)
        return self._fronts[key]

    def _make_front(self, roles: tuple[str, ...], devices: int) -> tuple[Point, ...]:
        if self.min_bytes(roles, devices) > self.costs.capacity:
            return ()
        elastic = [role for role in roles if role in self.costs.elastic]
        rigid = [role for role in roles if role not in self.costs.elastic]
        merged = self._merge([self.options(role, devices) for role in rigid])
        every = {role: self.options(role, devices) for role in roles}
        points = []
        for pick, chosen, seconds in self._with_elastic(merged, elastic, devices):
            at = {role: every[role][int(i)].layout for role, i in zip(rigid, merged.picks[pick], strict=True)}
            at |= {role: option.layout for role, option in zip(elastic, chosen, strict=True)}
            points.append(Point(tuple(map(float, seconds)), tuple(at[role] for role in roles)))
        if not points:
            return ()
        return tuple(points[i] for i in undominated(np.array([p.seconds for p in points])))

    def _merge(self, models: Sequence[Sequence[Option]]) -> _Merged:
        """The Pareto front, in bytes and seconds, of the rigid models' options, added model by model."""
        num_stages = len(models[0][0].seconds) if models else 0
        merged = _Merged(np.zeros((1, 2 + num_stages)), np.zeros((1, 0)))
        for options in models:
            table = np.array([(o.resident, o.working, *o.seconds) for o in options])
            sums = merged.values[:, None, :] + table[None, :, :]
            sums[:, :, 1] = np.maximum(merged.values[:, None, 1], table[None, :, 1])
            rows = sums.reshape(-1, sums.shape[2])
            picks = np.concatenate(
                [
                    np.repeat(merged.picks, len(table), axis=0),
                    np.tile(np.arange(len(table)), len(merged.values))[:, None],
                ],
                axis=1,
            )
            fits = rows[:, 0] + rows[:, 1] <= self.costs.capacity
            rows, picks = rows[fits], picks[fits]
            kept = undominated(rows)
            merged = _Merged(rows[kept], picks[kept])
        return merged

    def _with_elastic(
        self, merged: _Merged, elastic: Sequence[str], devices: int
    ) -> Iterator[tuple[int, tuple[Option, ...], Array]]:
        """Combine the rigid models' choices with options of the elastic ones, in the memory that is left.

        What is left depends on resident bytes alone. So of an elastic model's options with equal ones, as the
        options of one training layout have, only those count that are the fastest beside some choices.

        Yields:
            Row of `merged`, the elastic models' options, and the seconds of the whole set, [stages].
        """
        for alike in product(*(self._alike(role, devices) for role in elastic)):
            resident = merged.values[:, 0] + sum(options[0].resident for options in alike)
            fits = np.flatnonzero(resident + merged.values[:, 1] <= self.costs.capacity)
            if not len(fits):
                continue
            pairs = zip(elastic, alike, strict=True)
            for combo in product(*[self._fastest(role, options, resident[fits]) for role, options in pairs]):
                seconds = np.zeros((len(fits), 1)) + sum(own for _, own in combo)
                if merged.picks.shape[1]:
                    seconds = seconds + merged.values[fits, 2:]
                runs = np.flatnonzero(np.isfinite(seconds).all(axis=1))
                for i in runs[undominated(seconds[runs])]:
                    yield int(fits[i]), tuple(option for option, _ in combo), seconds[i]

    def _alike(self, role: str, devices: int) -> list[list[Option]]:
        """A model's options, those with equal resident bytes together."""
        found: dict[float, list[Option]] = {}
        for option in self.options(role, devices):
            found.setdefault(option.resident, []).append(option)
        return list(found.values())

    def _fastest(self, role: str, options: Sequence[Option], resident: Array) -> list[tuple[Option, Array]]:
        """Options that no other one beats beside all choices of the other models, each with its seconds.

        Args:
            role: an elastic model.
            options: some of its own, with equal resident bytes.
            resident: [choices], bytes of the whole set.

        Returns:
            With each option seconds [choices, stages], infinite where it does not fit.
        """
        every = []
        for option in options:
            seconds = self._seconds(role, option.layout).over(self.costs.capacity - resident)
            seconds[resident + option.working > self.costs.capacity] = math.inf
            every.append(seconds)
        kept = undominated(np.array([seconds.ravel() for seconds in every]))
        return [(options[i], every[i]) for i in kept]

    def _seconds(self, role: str, layout: ParallelLayout) -> Falling:
        """The seconds of an elastic model by free bytes."""
        key = (self.cost_class(role), layout)
        if key not in self._falling:
            self._falling[key] = Falling(lambda free: self.costs.seconds(role, layout, free))
        return self._falling[key]


def min_bytes(models: Sequence[Sequence[Option]]) -> float:
    """The least of resident bytes of all models + working bytes of the largest, over all choices of options.

    Args:
        models: options of each model.
    """
    stairs = [_stairs(options) for options in models]
    least = math.inf
    for limit in sorted({working for stair in stairs for working, _ in stair}):
        smallest = [min((r for w, r in stair if w <= limit), default=math.inf) for stair in stairs]
        least = min(least, sum(smallest) + limit)
    return least


def _stairs(options: Sequence[Option]) -> list[tuple[float, float]]:
    """(working, resident) of the options on their Pareto front, working bytes ascending."""
    result: list[tuple[float, float]] = []
    for working, resident in sorted((o.working, o.resident) for o in options):
        if not result or resident < result[-1][1]:
            result.append((working, resident))
    return result
