"""How many devices each set of models gets for the fastest iteration: HybridFlow's enum_alloc and d_cost.

An iteration takes the sum over its stages of the slowest set's seconds. The minimum is exact, by branch and
bound: sets are added one by one to partial allocations, and one is dropped where it cannot beat the best
known allocation, even if each stage had its own best division of the remaining devices among the remaining
sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_lightning.mapping.pareto import Array, Index, undominated

_BEAM = 64
"""Partial allocations that a first, approximate pass keeps; its result is the bound of the exact pass."""
_PRUNE_ABOVE = 4096
"""Partial allocations from which on the dominated ones are looked for and dropped."""
_EPS = 1e-12
"""Relative improvement over the first pass that the exact pass must find at least."""


@dataclass(frozen=True)
class Choices:
    """What one set can be given, one choice a row."""

    devices: Index
    """[choices, kinds]: how many devices of each kind; of all kinds but one none."""
    seconds: Array
    """[choices, stages]: seconds of the set in each stage."""


@dataclass(frozen=True)
class _Partial:
    """Partial allocations, one a row."""

    used: Index
    """[partials, kinds]: devices in use."""
    slowest: Array
    """[partials, stages]: seconds of the slowest set so far."""
    picks: Index
    """[partials, sets so far]: each set's choice."""


@dataclass(frozen=True)
class _Grid:
    """Every combination of numbers of devices that may be left, as the places of a flat table."""

    devices: Index
    """[kinds]: how many there are."""

    def place(self, left: Index) -> Index:
        """The places [...] of numbers of devices [..., kinds]; negative numbers count as 0."""
        strides = np.append(np.cumprod((self.devices + 1)[:0:-1])[::-1], 1)
        found: Index = np.maximum(left, 0) @ strides
        return found


def lower_bounds(sets: Sequence[Choices], grid: _Grid) -> list[Array]:
    """Item i: least seconds of sets i, i + 1, ... in each stage alone, [stages, places of devices left]."""
    num_stages = sets[0].seconds.shape[1]
    below = np.zeros((num_stages, *grid.devices + 1))
    result = [below.reshape(num_stages, -1)]
    for choice in reversed(sets):
        sizes, where = np.unique(choice.devices, axis=0, return_inverse=True)
        best = np.full((num_stages, len(sizes)), math.inf)
        for stage in range(num_stages):
            np.minimum.at(best[stage], where.ravel(), choice.seconds[:, stage])
        now = np.full_like(below, math.inf)
        for size, seconds in zip(sizes, best.T, strict=True):  # one by one: all at once take sizes x places
            with_it = now[:, *(slice(n, None) for n in size)]
            others = below[:, *(slice(n) for n in with_it.shape[1:])]
            with_it[:] = np.minimum(with_it, np.maximum(others.T, seconds).T)
        below = now
        result.append(below.reshape(num_stages, -1))
    return result[::-1]


def allocate(
    sets: Sequence[Choices], devices: Sequence[int], bound: float = math.inf
) -> tuple[float, list[int]] | None:
    """Choose for each set so that the sum over stages of the slowest set's seconds is least.

    Args:
        sets: the choices of each set.
        devices: how many there are of each kind; some may stay idle.
        bound: seconds that the result must be below.

    Returns:
        The seconds and the index of each set's choice; None where nothing is below the bound.
    """
    available = np.array(devices, dtype=np.int64)
    unit = np.gcd.reduce(np.vstack([available, *(choice.devices for choice in sets)]), axis=0)
    scaled = [Choices(choice.devices // unit, choice.seconds) for choice in sets]
    grid = _Grid(available // unit)
    low = lower_bounds(scaled, grid)
    if not low[0][:, -1].sum() < bound:
        return None
    found, complete = _extend(scaled, grid, low, bound=bound, width=_BEAM)
    if not complete:
        limit = bound if found is None else found[0]
        limit = limit * (1 - _EPS) if math.isfinite(limit) else limit
        better, _ = _extend(scaled, grid, low, bound=limit, width=None)
        found = better or found
    return found


def _extend(
    sets: Sequence[Choices], grid: _Grid, low: Sequence[Array], *, bound: float, width: int | None
) -> tuple[tuple[float, list[int]] | None, bool]:
    """Add set by set, keeping the `width` most promising partial allocations; None keeps all.

    Returns:
        As `allocate`; and whether nothing promising was dropped, so that the result is exact.
    """
    kinds = len(grid.devices)
    now = _Partial(np.zeros((1, kinds), np.int64), np.zeros((1, low[0].shape[0])), np.zeros((1, 0), np.int64))
    complete = True
    for choice, after in zip(sets, low[1:], strict=True):
        used = (now.used[:, None] + choice.devices[None]).reshape(-1, kinds)
        slowest = np.maximum(now.slowest[:, None], choice.seconds[None]).reshape(len(used), len(after))
        left = grid.devices - used
        at_least = np.maximum(slowest, after[:, grid.place(left)].T).sum(axis=1)
        kept = np.flatnonzero((left >= 0).all(axis=1) & (at_least < bound))
        if width is not None and len(kept) > width:
            kept, complete = kept[np.argsort(at_least[kept], kind="stable")[:width]], False
        elif len(kept) > _PRUNE_ABOVE:
            kept = kept[undominated(np.column_stack([used[kept], slowest[kept]]))]
        picks = np.column_stack([now.picks[kept // len(choice.devices)], kept % len(choice.devices)])
        now = _Partial(used[kept], slowest[kept], picks)
    if not len(now.used):
        return None, complete
    seconds = now.slowest.sum(axis=1)
    best = int(seconds.argmin())
    return (float(seconds[best]), [int(i) for i in now.picks[best]]), complete
