"""How a number of things is divided evenly."""

from __future__ import annotations

from itertools import pairwise


def edges(count: int, parts: int) -> list[int]:
    """Where each part begins, and where the last ends; sizes differ by at most one, and may be 0."""
    return [count * i // parts for i in range(parts + 1)]


def shares(count: int, parts: int) -> list[int]:
    """The sizes of the parts."""
    return [stop - start for start, stop in pairwise(edges(count, parts))]
