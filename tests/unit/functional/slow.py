"""The formulas once more in plain Python, one number at a time, in double precision."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from torch import Tensor

from tests.unit.functional.cases import valid

Rows = list[list[float]]


def rows_of(x: Tensor, mask: Tensor) -> Rows:
    """The valid numbers of each row."""
    return [[float(x[b, t]) for t in valid(mask, b)] for b in range(len(mask))]


def k3(d: float) -> float:
    return min(math.exp(-d) - 1 + d, 10.0)


def gae(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float, tail: float = 0.0
) -> list[float]:
    """Sum of (gamma lam)^k delta_{t+k} over the valid tokens alone, as if masked ones did not exist."""
    v = [*values, tail]
    delta = [r + gamma * v[i + 1] - v[i] for i, r in enumerate(rewards)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:])) for i in range(len(delta))]


def returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Sum of gamma^k r_{t+k} over the valid tokens."""
    return [sum(gamma**k * r for k, r in enumerate(rewards[i:])) for i in range(len(rewards))]


def whitened(rows: Rows, *, unbiased: bool = True) -> Rows:
    flat = [x for row in rows for x in row]
    if len(flat) < 2:
        return [[0.0 for _ in row] for row in rows]
    mean = statistics.fmean(flat)
    variance = statistics.variance(flat) if unbiased else statistics.pvariance(flat)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def limited(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)
