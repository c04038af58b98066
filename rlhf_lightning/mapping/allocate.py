"""How many devices each set gets: the exact minimum of the sum over stages of the slowest set (d_cost).

Sets are added one by one to partial allocations. A partial allocation is dropped where it cannot beat the
best known one: for each stage alone, the remaining sets on the remaining devices have a known best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_lightning.mapping.pareto import Array, Index, undominated

_BEAM = 64
"""Partial allocations that the first, approximate pass keeps: its result is the bound of the exact one."""
_CROWD = 4096
"""Partial allocations above which the dominated ones are sought out."""
_EPS = 1e-12


@dataclass(frozen=True)
class Choices:
    """What one set can be given."""

    devices: Index
    """[choices]"""
    seconds: Array
    """[choices, stages]"""


@dataclass(frozen=True)
class _Partial:
    """Partial allocations: devices used, the slowest set in each stage, and the choice of each set."""

    used: Index
    slowest: Array
    picks: Index


def lower_bounds(sets: Sequence[Choices], devices: int) -> list[Array]:
    """For sets i, i + 1, ... the least seconds of each stage alone on 0, 1, ... devices."""
    num_stages = sets[0].seconds.shape[1]
    below = np.zeros((num_stages, devices + 1))
    result = [below]
    for choice in reversed(sets):
        sizes, where = np.unique(choice.devices, return_inverse=True)
        best = np.full((num_stages, len(sizes)), math.inf)
        for stage in range(num_stages):
            np.minimum.at(best[stage], where, choice.seconds[:, stage])
        left = np.arange(devices + 1)[None, :] - sizes[:, None]
        others = np.where(left >= 0, below[:, np.maximum(left, 0)], math.inf)
        below = np.maximum(best[:, :, None], others).min(axis=1)
        result.append(below)
    return result[::-1]


def allocate(
    sets: Sequence[Choices], devices: int, bound: float = math.inf
) -> tuple[float, list[int]] | None:
    """Choose for each set so that the sum over stages of the slowest set is least.

    Args:
        sets: what each can be given.
        devices: how many there are; some may stay idle.
        bound: what the result must be below.

    Returns:
        The seconds and the index of each set's choice; None where nothing is below the bound.
    """
    unit = math.gcd(devices, *(int(n) for choice in sets for n in choice.devices))
    scaled = [Choices(choice.devices // unit, choice.seconds) for choice in sets]
    low = lower_bounds(scaled, devices // unit)
    if not low[0][:, -1].sum() < bound:
        return None
    found, whole = _extend(scaled, low, bound, _BEAM)
    if not whole:
        limit = bound if found is None else found[0]
        better, _ = _extend(scaled, low, limit * (1 - _EPS) if math.isfinite(limit) else limit, None)
        found = better or found
    return found


def _extend(
    sets: Sequence[Choices], low: Sequence[Array], bound: float, width: int | None
) -> tuple[tuple[float, list[int]] | None, bool]:
    """Add set by set, keeping the `width` most promising; say whether that was all."""
    devices = low[0].shape[1] - 1
    now = _Partial(np.zeros(1, np.int64), np.zeros((1, low[0].shape[0])), np.zeros((1, 0), np.int64))
    whole = True
    for choice, after in zip(sets, low[1:], strict=True):
        used = (now.used[:, None] + choice.devices[None]).ravel()
        slowest = np.maximum(now.slowest[:, None], choice.seconds[None]).reshape(len(used), len(after))
        at_least = np.maximum(slowest, after[:, np.minimum(devices - used, devices)].T).sum(axis=1)
        kept = np.flatnonzero((used <= devices) & (at_least < bound))
        if width is not None and len(kept) > width:
            kept, whole = kept[np.argsort(at_least[kept], kind="stable")[:width]], False
        elif len(kept) > _CROWD:
            kept = kept[undominated(np.column_stack([used[kept], slowest[kept]]))]
        picks = np.column_stack([now.picks[kept // len(choice.devices)], kept % len(choice.devices)])
        now = _Partial(used[kept], slowest[kept], picks)
    if not len(now.used):
        return None, whole
    seconds = now.slowest.sum(axis=1)
    best = int(seconds.argmin())
    return (float(seconds[best]), [int(i) for i in now.picks[best]]), whole
