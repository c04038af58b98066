"""How things are divided: evenly, by number and by cost, and by what fits together."""

from __future__ import annotations

import random
from itertools import pairwise, permutations

import pytest

from rlhf_lightning.parallel.shares import edges, evened, fitting_together, shares


def spent(costs: list[int], parts: int) -> list[int]:
    ends = edges(len(costs), parts)
    ordered = [costs[thing] for thing in evened(costs)]
    return [sum(ordered[start:stop]) for start, stop in pairwise(ends)]


def test_shares_differ_by_at_most_one() -> None:
    assert edges(10, 4) == [0, 2, 5, 7, 10]
    assert shares(10, 4) == [2, 3, 2, 3]
    assert shares(2, 3) == [0, 1, 1]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64])
def test_equal_costs_stay_as_they_are(count: int) -> None:
    assert evened([5] * count) == list(range(count))


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("count", [64, 61, 100])
def test_parts_of_equal_number_cost_about_the_same(count: int, parts: int) -> None:
    draw = random.Random(count)  # noqa: S311
    costs = [draw.randint(40, 400) for _ in range(count)]
    order = evened(costs)
    assert sorted(order) == list(range(count))
    mean = sum(costs) / parts
    by_number = 220 if count % parts else 0
    """One thing of mean cost more or less."""
    assert max(abs(each - mean) for each in spent(costs, parts)) < by_number + 0.08 * mean
    assert evened(costs) == order


def test_the_best_of_all_orders_is_not_far() -> None:
    costs = [9, 8, 7, 6, 5, 5, 2, 1]
    best = min(max(sum(order[:4]), sum(order[4:])) for order in permutations(costs))
    assert max(spent(costs, 2)) <= best + 1


def test_the_half_that_costs_less_takes_no_more_than_its_number() -> None:
    assert spent([10, 6, 3, 2], 2) == [12, 9]


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [([3, 4, 9, 1], [[3, 4], [9], [1]]), ([8, 0, 2], [[8], [0, 2]]), ([5, 3, 4], [[5], [3, 4]]), ([], [])],
)
def test_neighbours_that_fit_stay_together(sizes: list[int], runs: list[list[int]]) -> None:
    assert [sizes[run] for run in fitting_together(sizes, 7)] == runs
