"""Seconds that fall as free bytes grow, in steps: asked for only where the steps are not known yet."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from rlhf_lightning.mapping.pareto import Array


class Falling:
    """The seconds of one model in one layout, by stage, for any number of free bytes.

    Between two numbers of bytes with equal seconds all are taken to be equal, as they are where more memory
    never takes longer.

    Args:
        ask: the seconds with so many free bytes.
    """

    def __init__(self, ask: Callable[[float], Sequence[float]]) -> None:
        self._ask = ask
        self._free: list[float] = []
        self._seconds: list[tuple[float, ...]] = []

    def at(self, free: float) -> tuple[float, ...]:
        """The seconds with so many free bytes."""
        i = bisect_right(self._free, free)
        if i and (self._free[i - 1] == free or self._seconds[i - 1 : i] == self._seconds[i : i + 1]):
            return self._seconds[i - 1]
        self._free.insert(i, free)
        self._seconds.insert(i, tuple(self._ask(free)))
        return self._seconds[i]

    def over(self, free: Array) -> Array:
        """The seconds [len(free), stages] with each of the numbers of bytes, computed by bisection."""
        order = np.argsort(free, kind="stable")
        at = [float(free[place]) for place in order]
        spans = [(0, len(at) - 1, self.at(at[0]), self.at(at[-1]))]
        result = np.zeros((len(at), len(spans[0][2])))
        while spans:
            first, last, slow, fast = spans.pop()
            if slow == fast or last - first < 2:
                result[order[first:last]], result[order[last]] = slow, fast
                continue
            middle = (first + last) // 2
            between = self.at(at[middle])
            spans += [(first, middle, slow, between), (middle, last, between, fast)]
        return result
