"""Sets of whole numbers as intervals."""

from __future__ import annotations

from rlhf_lightning.parallel.intervals import pieces


def test_pieces_come_in_order_wherever_the_cuts_come() -> None:
    assert pieces([(0, 10), (12, 14)], [13, 8, 1, 10, 1]) == [(0, 1), (1, 8), (8, 10), (12, 13), (13, 14)]
