"""Equal rows of a table as one, named by all of their ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

Row = TypeVar("Row", bound=Hashable)
SHOWN = 4
"""Most words of one name."""


def alike(rows: Iterable[tuple[int, Row]]) -> list[tuple[str, Row]]:
    """Each different row once, in the order in which they come first, with its ranks in words.

    Args:
        rows: rank and row, by rising rank.
    """
    found: dict[Row, list[int]] = {}
    for rank, row in rows:
        found.setdefault(row, []).append(rank)
    return [(ranks_text(ranks), row) for row, ranks in found.items()]


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
