"""Groups of the paper's Figure 8 and others, written by hand, and coordinates there and back."""

from __future__ import annotations

from itertools import product

import pytest

from rlhf_lightning.parallel import Generation, GenerationLayout, ParallelLayout, named_groups
from rlhf_lightning.parallel.layout import Coordinate, Order, Rule

ORDERS: tuple[Order, ...] = ("tpd", "tdp")
RULES: tuple[Rule, ...] = ("hybridflow", "vanilla")
Groups = tuple[str, str, str]
"""Tensor, pipeline and micro-DP groups, ranks from 0 to 7."""
SINGLE = "0 1 2 3 4 5 6 7"
FIGURE_8: list[tuple[tuple[int, int, int], tuple[int, int], Rule, Groups]] = [
    # train, generate, rule, groups; p or d is 1, so that the groups are those of both orders
    ((1, 4, 2), (1, 2), "hybridflow", ("02 13 46 57", SINGLE, "01 23 45 67")),
    ((1, 4, 2), (1, 2), "vanilla", ("01 23 45 67", SINGLE, "02 13 46 57")),
    ((1, 8, 1), (1, 2), "hybridflow", ("04 15 26 37", SINGLE, "0123 4567")),
    ((1, 8, 1), (1, 2), "vanilla", ("01 23 45 67", SINGLE, "0246 1357")),
    ((2, 4, 1), (1, 2), "hybridflow", ("02 13 46 57", SINGLE, "0145 2367")),
    ((2, 4, 1), (1, 2), "vanilla", ("01 23 45 67", SINGLE, "0246 1357")),
    ((2, 4, 1), (2, 2), "hybridflow", ("02 13 46 57", "04 15 26 37", "01 23 45 67")),
    ((2, 4, 1), (2, 2), "vanilla", ("01 23 45 67", "02 13 46 57", "04 15 26 37")),
    ((4, 2, 1), (2, 1), "hybridflow", (SINGLE, "04 15 26 37", "0123 4567")),
    ((4, 2, 1), (2, 1), "vanilla", (SINGLE, "01 23 45 67", "0246 1357")),
]
ORDERED: list[tuple[Order, tuple[int, int], Rule, Groups]] = [
    ("tpd", (1, 2), "hybridflow", ("01 23 45 67", SINGLE, "02 13 46 57")),
    ("tdp", (1, 2), "hybridflow", ("01 23 45 67", SINGLE, "04 15 26 37")),
    ("tdp", (1, 2), "vanilla", ("01 23 45 67", SINGLE, "04 15 26 37")),
    ("tdp", (2, 1), "hybridflow", (SINGLE, "04 15 26 37", "01 23 45 67")),
    ("tdp", (2, 1), "vanilla", (SINGLE, "01 23 45 67", "04 15 26 37")),
    ("tpd", (1, 1), "vanilla", (SINGLE, SINGLE, "0123 4567")),
    ("tdp", (1, 1), "hybridflow", (SINGLE, SINGLE, "0145 2367")),
]


def groups(text: str) -> list[list[int]]:
    return [[int(rank) for rank in group] for group in text.split()]


def check(layout: GenerationLayout, expected: Groups) -> None:
    found = [sorted(layout.groups("t")), sorted(layout.groups("p")), sorted(layout.groups("micro"))]
    assert found == [groups(text) for text in expected]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("train", "generate", "rule", "expected"), FIGURE_8)
def test_generation_groups_are_those_of_the_papers_figure(
    train: tuple[int, int, int], generate: tuple[int, int], rule: Rule, expected: Groups, order: Order
) -> None:
    check(ParallelLayout(*train, order=order, generation=Generation(*generate, rule)).generating, expected)


@pytest.mark.parametrize(("order", "generate", "rule", "expected"), ORDERED)
def test_generation_groups_follow_the_order_of_ranks(
    order: Order, generate: tuple[int, int], rule: Rule, expected: Groups
) -> None:
    check(ParallelLayout(2, 2, 2, order=order, generation=Generation(*generate, rule)).generating, expected)


@pytest.mark.parametrize(
    ("order", "pipeline", "tensor", "data", "replicas"),
    [
        ("tpd", "02 13 46 57", "01 23 45 67", "04 15 26 37", "0123 4567"),
        ("tdp", "04 15 26 37", "01 23 45 67", "02 13 46 57", "0145 2367"),
    ],
)
def test_training_groups_follow_the_order_of_ranks(
    order: Order, pipeline: str, tensor: str, data: str, replicas: str
) -> None:
    layout = ParallelLayout(2, 2, 2, order=order)
    assert sorted(layout.groups("p")) == groups(pipeline)
    assert sorted(layout.groups("t")) == groups(tensor)
    assert sorted(layout.groups("d")) == groups(data)
    assert layout.replicas == groups(replicas)
    assert layout.output_ranks == [replica[2] for replica in layout.replicas]  # last stage, first tensor rank


@pytest.mark.parametrize("order", ORDERS)
def test_coordinates_there_and_back(order: Order) -> None:
    layout = ParallelLayout(2, 3, 4, order=order)
    places = [layout.coordinate(rank) for rank in range(24)]
    assert set(places) == {Coordinate(p, t, d) for p, t, d in product(range(2), range(3), range(4))}
    assert [layout.rank(place) for place in places] == list(range(24))


@pytest.mark.parametrize(("order", "rule"), [*product(ORDERS, RULES)])
def test_generation_coordinates_there_and_back(order: Order, rule: Rule) -> None:
    layout = ParallelLayout(4, 4, 2, order=order, generation=Generation(2, 2, rule)).generating
    places = [layout.coordinate(rank) for rank in range(32)]
    assert set(places) == set(product(range(2), range(2), range(4), range(2)))
    assert [layout.rank(place) for place in places] == list(range(32))
    assert (layout.num_micro, layout.num_replicas) == (4, 8)
    assert [layout.replica(rank) for rank in layout.output_ranks] == list(range(8))
    for rank in range(32):
        copies = [other for other in range(32) if layout.replica(other) == layout.replica(rank)]
        assert len(copies) == 4
        assert {layout.coordinate(other)[:2] for other in copies} == set(product(range(2), repeat=2))


@pytest.mark.parametrize("order", ORDERS)
def test_hybridflow_keeps_each_rank_in_its_part_of_the_model(order: Order) -> None:
    """Stage p of training lies in stage p pg / p of generation, and tensor rank t in t tg / t."""
    layout = ParallelLayout(4, 8, 2, order=order, generation=Generation(2, 4))
    for rank in range(64):
        train, generate = layout.coordinate(rank), layout.generating.coordinate(rank)
        assert (generate.p, generate.t, generate.d) == (train.p // 2, train.t // 2, train.d)


def test_generation_is_as_training_where_nothing_else_is_said() -> None:
    generating = ParallelLayout(2, 4, 2).generating
    assert (generating.p, generating.t, generating.num_micro) == (2, 4, 1)
    assert generating.rule == "hybridflow"


def test_groups_go_by_the_names_of_what_they_share() -> None:
    """The drawing at the head of `groups`, and a pipeline with a stage between its ends."""
    found = named_groups(ParallelLayout(1, 4, 2, generation=Generation(1, 2)))
    assert found["tensor"] == groups("0123 4567")
    assert sorted(found["generation_tensor"]) == groups("02 13 46 57")
    assert sorted(found["data"]) == groups("04 15 26 37")
    assert sorted(found["micro"]) == groups("01 23 45 67")
    for name in ("alone", "pipeline", "ends", "generation_pipeline"):
        assert sorted(found[name]) == groups(SINGLE)
    stages = named_groups(ParallelLayout(3, 1, 1))
    assert (stages["pipeline"], stages["replica"], stages["ends"]) == ([[0, 1, 2]], [[0, 1, 2]], [[0, 2]])


def test_copies_are_counted_replica_by_replica() -> None:
    generating = ParallelLayout(1, 2, 2, generation=Generation(1, 1)).generating
    assert [generating.replica(rank) for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ParallelLayout(1, 4, generation=Generation(1, 3)), "generate t=1 or 2 or 4"),
        (lambda: ParallelLayout(6, 1, generation=Generation(4, 1)), "generate p=1 or 2 or 3 or 6"),
        (lambda: GenerationLayout(ParallelLayout(1, 4), t=8), "train t=4, generate t=8"),
        (lambda: GenerationLayout(ParallelLayout(1, 4), t=-1), "train t=4, generate t=-1"),
        (lambda: ParallelLayout(0, 1, 1), "ParallelLayout(p=0, t=1, d=1): every size is at least 1"),
        (lambda: Generation(1, 0), "Generation(p=1, t=0): every size is at least 1"),
        (lambda: ParallelLayout(order="dtp"), "tpd (the paper's) or tdp (Megatron's)"),  # type: ignore[arg-type]
    ],
)
def test_impossible_layouts_are_refused(make: object, said: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is looked at below
        make()
    assert said in str(refused.value)
