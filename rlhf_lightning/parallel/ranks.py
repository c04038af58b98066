"""Ranks, or devices, in words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

SHOWN = 4
"""Most words of many ranks."""


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-7`, `0 4 8`, or `0-1 8-9 .. 56-57` for many at equal distances."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(runs)}
    return " ".join([*words[:2], "..", words[-1]] if len(words) > SHOWN and len(steps) == 1 else words)
