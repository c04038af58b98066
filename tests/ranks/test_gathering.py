"""HybridFlow-V's transition of real ranks: values, bytes received, and what is held twice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlhf_lightning.parallel.buckets import stored_as
from tests.unit import spmd
from tests.unit.parallel.memory import storages
from tests.unit.parallel.models import Case

CASES = (
    Case((1, 4, 1), (1, 2), rule="vanilla"),
    Case((2, 2, 1), (1, 1), num_layers=5, tied=True, rule="vanilla"),
    Case((4, 1, 1), (2, 1), tied=True, rule="vanilla"),
    Case((2, 1, 2), (1, 1), num_layers=8, chunks=2, rule="vanilla"),
    Case((2, 2, 2), (1, 2), order="tdp", rule="vanilla"),
)


def there_and_back(_: dist.ProcessGroup, case: Case) -> None:
    rank, gathered = dist.get_rank(), case.gathered()
    parameters = gathered.parameters
    before = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    wanted = {q.name: q for q in case.generated(rank)}
    for update in (0, 1):
        for parameter in parameters.values():
            parameter.data.add_(update)
        with torch.inference_mode():
            shard = gathered.gather()
        assert gathered.received_bytes == case.model_bytes - case.training_bytes(rank)
        expected = case.generation_shard(rank)
        assert shard.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(shard[name], value + update), name
            assert not shard[name].is_inference()
            assert stored_as(wanted[name], shard[name]).is_contiguous(), name
        copies = sum(storages(shard.values()).values())
        assert copies == case.generation_bytes(rank)
        assert gathered.size_bytes == copies + case.training_bytes(rank)
        del shard
        gathered.release()
        assert gathered.size_bytes == case.training_bytes(rank)
    assert before == {name: parameter.data_ptr() for name, parameter in parameters.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_generates_with_a_copy_and_trains_where_it_did(case: Case) -> None:
    spmd.run(case.layout.num_ranks, there_and_back, case)
