"""Ranks in words."""

from __future__ import annotations

import pytest

from rlhf_lightning.parallel.ranks import ranks_text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0, 1, 2, 3, 8], "0-3 8"),
        ([0, 2, 4, 6], "0 2 4 6"),
        ([0, 2, 4, 6, 8], "0 2 .. 8"),
        ([0, 1, 8, 9, 16, 17, 24, 25, 32, 33], "0-1 8-9 .. 32-33"),
        ([0, 1, 4, 8, 12, 16], "0-1 4 8 12 16"),
        ([0, 4, 8, 12, 16, 17], "0 4 8 12 16-17"),
    ],
)
def test_many_are_abbreviated_only_where_two_and_the_last_tell_all(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
