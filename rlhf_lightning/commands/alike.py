"""Equal rows of a table as one, named by all of their ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from rlhf_lightning.parallel.ranks import ranks_text

Row = TypeVar("Row", bound=Hashable)


def alike(rows: Iterable[tuple[int, Row]]) -> list[tuple[str, Row]]:
    """Each different row once, in the order in which they come first, with its ranks in words.

    Args:
        rows: rank and row, by rising rank.
    """
    found: dict[Row, list[int]] = {}
    for rank, row in rows:
        found.setdefault(row, []).append(rank)
    return [(ranks_text(ranks), row) for row, ranks in found.items()]
