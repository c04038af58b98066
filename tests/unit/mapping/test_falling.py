"""Seconds that fall in steps are asked for rarely, and are those that asking each time gives."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rlhf_lightning.mapping.falling import Falling


@pytest.mark.parametrize("steps", [1, 3, 40])
def test_what_is_asked_rarely_is_what_would_be_asked_each_time(steps: int) -> None:
    draw, asked = random.Random(steps), list[float]()  # noqa: S311
    edges = sorted(draw.random() for _ in range(steps))

    def seconds(free: float) -> tuple[float, ...]:
        asked.append(free)
        return (1.0, float(sum(edge > free for edge in edges)))

    falling, rounds = Falling(seconds), 20
    for _ in range(rounds):
        free = np.array([draw.random() for _ in range(100)])
        expected = [[1.0, sum(edge > one for edge in edges)] for one in free]
        assert falling.over(free).tolist() == expected
        assert falling.at(float(free[0])) == tuple(expected[0])
    assert len(asked) == len(set(asked)) <= rounds * 2 + 22 * steps
