"""The process groups of each rank are those of its layout."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import pytest
import torch
import torch.distributed as dist

from rlhf_lightning.parallel import Generation, ModelGroups, ParallelLayout, all_ranks, named_groups
from tests.unit import spmd

LAYOUT = ParallelLayout(2, 2, 1, generation=Generation(1, 2))
MEMBERS = {
    "tensor": ([0, 1], [2, 3]),
    "pipeline": ([0, 2], [1, 3]),
    "data": ([0], [1], [2], [3]),
    "replica": ([0, 1, 2, 3],),
    "ends": ([0, 2], [1, 3]),
    "alone": ([0], [1], [2], [3]),
    "micro": ([0, 2], [1, 3]),
    "generation_tensor": ([0, 1], [2, 3]),
    "generation_pipeline": ([0], [1], [2], [3]),
}


def test_groups_are_those_found_by_hand() -> None:
    assert {name: tuple(sorted(groups)) for name, groups in named_groups(LAYOUT).items()} == MEMBERS
    assert list(named_groups(LAYOUT)) == [field.name for field in fields(ModelGroups)]


def test_ends_leave_out_the_stages_between() -> None:
    assert named_groups(ParallelLayout(4, 2))["ends"] == [[0, 6], [1, 7]]
    assert named_groups(ParallelLayout(1, 2))["ends"] == [[0], [1]]


@pytest.mark.parametrize(("order", "rule"), [*product(("tpd", "tdp"), ("hybridflow", "vanilla"))])
def test_each_rank_is_in_one_group_of_each_name(order: str, rule: str) -> None:
    generation = Generation(1, 2, rule)  # type: ignore[arg-type]
    layout = ParallelLayout(4, 4, 2, order=order, generation=generation)  # type: ignore[arg-type]
    for name, groups in named_groups(layout).items():
        if name != "ends":
            assert sorted(rank for group in groups for rank in group) == list(range(32))
    every = all_ranks(layout)
    assert len(every) == len(set(every))
    assert {tuple(group) for groups in named_groups(layout).values() for group in groups} == set(every)


def members(group: dist.ProcessGroup) -> tuple[dict[str, list[int]], float]:
    found = ModelGroups.create_all(LAYOUT)
    every = {f.name: dist.get_process_group_ranks(getattr(found, f.name)) for f in fields(ModelGroups)}
    number = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(number, group=found.micro)
    return every, number.item()


def test_every_rank_gets_its_groups() -> None:
    for rank, (groups, added) in enumerate(spmd.run(4, members)):
        for name, expected in MEMBERS.items():
            assert groups[name] == next(ranks for ranks in expected if rank in ranks), (rank, name)
        assert added == (2 if rank in (0, 2) else 4)  # 0 + 2 and 1 + 3
