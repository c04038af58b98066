"""The Pareto front of many choices: those that no other choice beats in everything."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]


def undominated(rows: Array) -> Index:
    """Indices of the rows of [n, k] that no other row dominates, which is at most as large in every column.

    Of equal rows the first is kept.
    """
    left = np.argsort(rows.sum(axis=1), kind="stable")
    kept: list[int] = []
    while len(left):
        best = left[0]
        kept.append(int(best))
        left = left[(rows[left] < rows[best]).any(axis=1)]
    return np.array(kept, dtype=np.int64)
