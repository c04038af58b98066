"""Sets of whole numbers as sorted lists of intervals [start, stop), none of them empty."""

from __future__ import annotations

from collections.abc import Sequence

Interval = tuple[int, int]
"""[start, stop), not empty."""


def meet(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The intersection of two sets."""
    both = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return [(start, stop) for start, stop in both if start < stop]


def minus(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The first set without the second."""
    left = list(one)
    for start, stop in other:
        pieces = [piece for a, b in left for piece in ((a, min(b, start)), (max(a, stop), b))]
        left = [(a, b) for a, b in pieces if a < b]
    return left


def pieces(intervals: Sequence[Interval], cuts: Sequence[int]) -> list[Interval]:
    """The intervals, cut wherever a cut lies within one."""
    ends = sorted(set(cuts))
    found = []
    for start, stop in intervals:
        inner = [cut for cut in ends if start < cut < stop]
        found += list(zip([start, *inner], [*inner, stop], strict=True))
    return found
