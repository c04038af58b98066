"""The Pareto front against all pairs of choices."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_lightning.mapping.pareto import undominated


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_what_stays_is_what_no_other_beats_and_of_equals_the_first(columns: int) -> None:
    rows = np.random.default_rng(0).integers(0, 6, (80, columns)).astype(np.float64)
    beaten = [
        any(
            (a <= b).all() and ((a < b).any() or first < second)
            for first, a in enumerate(rows)
            if first != second
        )
        for second, b in enumerate(rows)
    ]
    assert sorted(undominated(rows).tolist()) == [row for row, lost in enumerate(beaten) if not lost]


def test_of_nothing_nothing_stays() -> None:
    assert undominated(np.empty((0, 2))).tolist() == []
