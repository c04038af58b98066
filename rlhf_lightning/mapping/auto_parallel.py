"""The best layouts of the models of one set on a number of devices (HybridFlow appendix C, Algorithm 2).

options(role, n)     layouts of one model that fit alone and that no other beats in bytes and seconds
ideal(roles, n)      seconds per stage that no choice of layouts can beat: each model at its best, alone
front(roles, n)      choices of a layout for every model that fit together and that no other choice beats

Everything is kept, by what the models cost and not by their names, so that equal models are laid out once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from rlhf_lightning.mapping.costs import Costs, Layout
from rlhf_lightning.mapping.pareto import Array, undominated

_Key = tuple[int, ...]


@dataclass(frozen=True)
class Option:
    """One layout of one model."""

    layout: Layout
    resident: float
    """Bytes per device through the whole iteration."""
    working: float
    """Bytes per device on top while the model computes."""
    seconds: tuple[float, ...]
    """In each stage; of a model that generates with all memory that it would have alone."""


@dataclass(frozen=True)
class Point:
    """One layout for every model of a set."""

    seconds: tuple[float, ...]
    """Of the whole set in each stage."""
    layouts: tuple[Layout, ...]
    """In the order of the roles."""


@dataclass(frozen=True)
class _Merged:
    """Choices for several models: row i of `values` comes from option picks[m][i] of the m-th model."""

    values: Array
    """Columns: resident, working, seconds of each stage."""
    picks: Array
    """[choices, models]"""


class AutoParallel:
    """Chooses layouts, and remembers."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._ids: dict[Hashable, int] = {}
        self._options: dict[tuple[int, int], tuple[Option, ...]] = {}
        self._bests: dict[tuple[int, int], Array] = {}
        self._least: dict[tuple[_Key, int], float] = {}
        self._ideals: dict[tuple[_Key, int], Array | None] = {}
        self._fronts: dict[tuple[_Key, int], tuple[Point, ...]] = {}

    def kind(self, role: str) -> int:
        """A number that models of equal cost share."""
        return self._ids.setdefault(self.costs.signature(role), len(self._ids))

    def key(self, roles: Sequence[str]) -> _Key:
        """What the set costs, whatever its models are called."""
        return tuple(sorted(self.kind(role) for role in roles))

    def ordered(self, roles: Sequence[str]) -> tuple[str, ...]:
        """The roles of a set in the order of the layouts of its points."""
        return tuple(sorted(roles, key=self.kind))

    def options(self, role: str, devices: int) -> tuple[Option, ...]:
        """Layouts of a model; least memory first."""
        key = (self.kind(role), devices)
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

    def least(self, roles: Sequence[str], devices: int) -> float:
        """Bytes per device that the set takes at the least; infinite where a model has no layout at all."""
        key = (self.key(roles), devices)
        if key not in self._least:
            self._least[key] = least_bytes([self.options(role, devices) for role in roles])
        return self._least[key]

    def ideal(self, roles: Sequence[str], devices: int) -> Array | None:
        """Seconds in each stage that the set cannot beat; None where it does not fit."""
        key = (self.key(roles), devices)
        if key not in self._ideals:
            self._ideals[key] = self._make_ideal(roles, devices)
        return self._ideals[key]

    def _make_ideal(self, roles: Sequence[str], devices: int) -> Array | None:
        if self.least(roles, devices) > self.costs.capacity:
            return None
        ideal: Array = np.sum([self._best(role, devices) for role in roles], axis=0)
        return ideal

    def _best(self, role: str, devices: int) -> Array:
        """The least seconds of a model in each stage, be it on different layouts."""
        key = (self.kind(role), devices)
        if key not in self._bests:
            self._bests[key] = np.array([o.seconds for o in self.options(role, devices)]).min(axis=0)
        return self._bests[key]

    def known(self, roles: Sequence[str], devices: int) -> tuple[Point, ...] | None:
        """The front, if it was computed before."""
        return self._fronts.get((self.key(roles), devices))

    def front(self, roles: Sequence[str], devices: int) -> tuple[Point, ...]:
        """All choices for a set that no other beats in the seconds of every stage."""
        key = (self.key(roles), devices)
        if key not in self._fronts:
            self._fronts[key] = self._make_front(self.ordered(roles), devices)
        return self._fronts[key]

    def _make_front(self, roles: tuple[str, ...], devices: int) -> tuple[Point, ...]:
        if self.least(roles, devices) > self.costs.capacity:
            return ()
        elastic = [role for role in roles if role in self.costs.elastic]
        rigid = [role for role in roles if role not in self.costs.elastic]
        merged = self._merge([self.options(role, devices) for role in rigid])
        every = {role: self.options(role, devices) for role in roles}
        points = []
        for pick, chosen, seconds in self._together(merged, elastic, devices):
            at = {role: every[role][int(i)].layout for role, i in zip(rigid, merged.picks[pick], strict=True)}
            at |= {role: option.layout for role, option in zip(elastic, chosen, strict=True)}
            points.append(Point(tuple(map(float, seconds)), tuple(at[role] for role in roles)))
        if not points:
            return ()
        return tuple(points[i] for i in undominated(np.array([p.seconds for p in points])))

    def _merge(self, models: Sequence[Sequence[Option]]) -> _Merged:
        """Choices for models whose seconds do not depend on each other's memory, model by model."""
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

    def _together(
        self, merged: _Merged, elastic: Sequence[str], devices: int
    ) -> Iterator[tuple[int, tuple[Option, ...], Array]]:
        """Join the rigid models' choices with those that generate in the memory that is left."""
        for combo in product(*(self.options(role, devices) for role in elastic)):
            resident = merged.values[:, 0] + sum(o.resident for o in combo)
            working = np.maximum(merged.values[:, 1], max((o.working for o in combo), default=0.0))
            fits = np.flatnonzero(resident + working <= self.costs.capacity)
            seconds = self._seconds(elastic, combo, self.costs.capacity - resident[fits])
            if merged.picks.shape[1]:
                seconds = seconds + merged.values[fits, 2:]
            runs = np.flatnonzero(np.isfinite(seconds).all(axis=1))
            for i in runs[undominated(seconds[runs])]:
                yield int(fits[i]), combo, seconds[i]

    def _seconds(self, roles: Sequence[str], combo: Sequence[Option], free: Array) -> Array:
        """Seconds [len(free), stages] of some models, computed only where they change with free memory.

        More memory never makes them longer, so that what is equal at both ends is equal in between.
        """
        order = np.argsort(free, kind="stable")
        result = np.zeros((len(free), len(combo[0].seconds) if combo else 1))
        if not combo or not len(free):
            return result

        def at(place: int) -> tuple[float, ...]:
            left = float(free[order[place]])
            each = [self.costs.seconds(r, o.layout, left) for r, o in zip(roles, combo, strict=True)]
            return tuple(sum(column) for column in zip(*each, strict=True))

        spans = [(0, len(free) - 1, at(0), at(len(free) - 1))]
        while spans:
            first, last, slow, fast = spans.pop()
            if slow == fast or last - first < 2:
                result[order[first:last]], result[order[last]] = slow, fast
                continue
            middle = (first + last) // 2
            between = at(middle)
            spans += [(first, middle, slow, between), (middle, last, between, fast)]
        return result


def least_bytes(models: Sequence[Sequence[Option]]) -> float:
    """Bytes per device of the choice that takes the least: all residents and the largest worker."""
    stairs = [_stairs(options) for options in models]
    least = math.inf
    for limit in sorted({working for stair in stairs for working, _ in stair}):
        smallest = [min((r for w, r in stair if w <= limit), default=math.inf) for stair in stairs]
        least = min(least, sum(smallest) + limit)
    return least


def _stairs(options: Sequence[Option]) -> list[tuple[float, float]]:
    """(working, resident) of the options, as long as more of the one buys less of the other."""
    result: list[tuple[float, float]] = []
    for working, resident in sorted((o.working, o.resident) for o in options):
        if not result or resident < result[-1][1]:
            result.append((working, resident))
    return result
