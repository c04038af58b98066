"""What travels between the members of a micro-DP group: all of a generation shard once, and nothing else."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod

import pytest
import torch

from rlhf_lightning.parallel import Generation, ParallelLayout, Sharded
from rlhf_lightning.parallel.buckets import Slot, buckets
from tests.unit.parallel.models import Case

SIZES = (1, 2, 4)
CASES = [
    Case((p, t, 1), (pg, tg), num_layers=num_layers, tied=tied)
    for p, t, pg, tg in product(SIZES, repeat=4)
    for num_layers, tied in ((4, False), (5, True))
    if p % pg == 0 and t % tg == 0
]


def slots(case: Case, stage: int) -> list[Slot]:
    found = buckets(case.params, case.stages, case.layout.generating, stage=stage)
    return [slot for bucket in found for slot in bucket]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_member_receives_once_what_it_does_not_train(case: Case) -> None:
    found = {stage: slots(case, stage) for stage in range(case.generate[0])}
    for rank in range(case.layout.num_ranks):
        at = case.layout.generating.coordinate(rank)
        received, trained = 0, set()
        for slot in found[at.p]:
            assert [piece for piece, _, to in slot.routes if to == at.micro] == slot.missing(at.micro)
            assert all(sender in slot.owners[piece] for piece, sender, _ in slot.routes)
            received += len(slot.missing(at.micro)) * prod(slot.stored) * case.dtype.itemsize
            if (own := slot.own(at.micro)) is not None:
                trained.add(slot.params[own * len(slot.params) // len(slot.owners)].name)
        assert received == case.generation_bytes(rank) - case.training_bytes(rank)
        assert trained == {param.name for param in case.trained(rank)}
        names = Counter(param.name for slot in found[at.p] for param in slot.params)
        assert names == Counter(param.name for param in case.generated(rank))


@pytest.mark.parametrize(
    ("case", "hows"),
    [
        (Case((1, 4, 1), (1, 2)), {"0.fc1": "gather", "0.norm": "nothing", "embedding": "gather"}),
        (Case((2, 1, 1), (1, 1)), {"0.fc1": "gather", "0.norm": "gather", "embedding": "broadcast"}),
        (Case((2, 2, 1), (1, 1)), {"0.fc1": "gather", "0.norm": "pairs", "head": "broadcast"}),
        (Case((2, 2, 1), (1, 1), 5, tied=True), {"2.fc2": "broadcast", "embedding": "pairs"}),
    ],
    ids=str,
)
def test_the_way_suits_the_owners(case: Case, hows: dict[str, str]) -> None:
    found = {param.name: slot.how for slot in slots(case, 0) for param in slot.params}
    assert {name: found[name] for name in hows} == hows


def test_what_stands_at_the_ends_comes_after_a_layer_that_all_members_have() -> None:
    case = Case((2, 1, 1), (1, 1))
    found = buckets(case.params, case.stages, case.layout.generating, stage=0)
    layers = [all(isinstance(q.place, int) for slot in bucket for q in slot.params) for bucket in found]
    assert layers == [True, False, True]


def test_a_piece_comes_from_the_nearest_stage_and_there_from_the_nearest_chunk() -> None:
    tied = Sharded("tied", (8, 4), "ends", 0)
    layout = ParallelLayout(4, 2, generation=Generation(1, 1))
    ((slot,),) = [b for b in buckets([tied], [[0], [1], [2], [3]], layout.generating, stage=0) if b]
    assert slot.owners == ((0, 6), (1, 7))
    routes = {(piece, receiver): sender for piece, sender, receiver in slot.routes}
    assert routes == {
        (0, 1): 0, (0, 7): 6, (1, 0): 1, (1, 6): 7,
        (0, 2): 0, (0, 3): 0, (0, 4): 6, (0, 5): 6,
        (1, 2): 1, (1, 3): 1, (1, 4): 7, (1, 5): 7,
    }  # fmt: skip


def test_memory_of_a_slot_is_read_chunk_by_chunk() -> None:
    """Two stages of two chunks each: fc2 [3, 4], divided along dimension 1, lies transposed."""
    params = [Sharded(f"{i}.fc2", (3, 4), i, 1) for i in range(2)]
    layout = ParallelLayout(2, 2, generation=Generation(1, 1))
    (slot,) = buckets(params, [[0], [1]], layout.generating, stage=0)[0]
    store = torch.arange(24).view(4, 2, 3)
    found = slot.tensors(store)
    assert found["0.fc2"].tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert found["1.fc2"].tolist() == [[12, 15, 18, 21], [13, 16, 19, 22], [14, 17, 20, 23]]
    assert found["1.fc2"].untyped_storage().data_ptr() == store.untyped_storage().data_ptr()
