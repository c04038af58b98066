"""Running mean and standard deviation, as a tensor of three numbers that checkpoints can hold.

A state is float64 [3]: count, mean and sum of squared deviations. It starts as zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOISE = 1e-12
"""Variance over squared mean, or mean square, below which float64 sums of squares show no variance at all."""


def merged(state: Tensor, total: Tensor | float, squares: Tensor | float, count: Tensor | float) -> Tensor:
    """Update a state by more numbers, given their sum, sum of squares and count (Chan 1983).

    Args:
        state: float64 [3].
        total: sum of the new numbers; a scalar, float64 keeps its digits.
        squares: sum of their squares.
        count: how many there are; 0 changes nothing.

    Returns:
        The new state, float64 [3]; `state` itself where the count is 0.
    """
    n, mean, deviations = state.unbind()
    total, squares, more = (torch.as_tensor(x, dtype=torch.float64) for x in (total, squares, count))
    if more == 0:
        return state
    step = total / more - mean
    inner = (squares - total.square() / more).clamp(min=0)
    between = step.square() * n * more / (n + more)
    return torch.stack((n + more, mean + step * more / (n + more), deviations + inner + between))


def mean_std(state: Tensor) -> tuple[float, float]:
    """Mean and standard deviation (over n) of all numbers so far.

    Returns:
        The standard deviation is 1 where there is none to divide by: no numbers, or all of them equal.
    """
    count, mean, deviations = state.tolist()
    variance = deviations / count if count else 0.0
    return mean, variance**0.5 if variance > NOISE * mean * mean else 1.0
