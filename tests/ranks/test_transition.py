"""The transition of real ranks: values, views, bytes on the wire and bytes in memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rlhf_lightning.parallel import transition
from rlhf_lightning.parallel.buckets import stored_as
from tests.unit import spmd
from tests.unit.parallel import memory
from tests.unit.parallel.memory import storages
from tests.unit.parallel.models import Case

FOUR = (
    Case((1, 4, 1), (1, 2)),
    Case((2, 2, 1), (1, 1)),
    Case((2, 2, 1), (1, 1), num_layers=5, tied=True),
    Case((4, 1, 1), (1, 1), tied=True),
    Case((4, 1, 1), (1, 1), num_layers=5),
    Case((2, 1, 2), (1, 1), num_layers=8, chunks=2),
    Case((4, 1, 1), (2, 1), num_layers=9, chunks=2),
    Case((1, 4, 1), (1, 1), dtype=torch.bfloat16),
    Case((2, 2, 1), (2, 2)),
)
EIGHT = (
    Case((1, 4, 2), (1, 2)),
    Case((2, 4, 1), (1, 2)),
    Case((2, 4, 1), (1, 2), num_layers=5, tied=True),
    Case((2, 4, 1), (2, 2)),
    Case((4, 2, 1), (2, 1)),
    Case((4, 2, 1), (2, 1), num_layers=6, tied=True),
    Case((4, 2, 1), (1, 1), tied=True),
    Case((2, 2, 2), (1, 1)),
    Case((2, 2, 2), (1, 1), order="tdp"),
)


def check_there_and_back(case: Case) -> None:
    """Two transitions; the parameters are updated in place before the second."""
    rank, buffer = dist.get_rank(), case.buffer()
    parameters = buffer.parameters
    strides = {name: parameter.stride() for name, parameter in parameters.items()}
    wanted = {q.name: q for q in case.generated(rank)}
    for update in (0, 1):
        for parameter in parameters.values():
            parameter.data.add_(update)
        shard = buffer.gather()
        assert buffer.received_bytes == case.generation_bytes(rank) - case.training_bytes(rank)
        expected = case.generation_shard(rank)
        assert shard.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(shard[name], value + update), name
            assert stored_as(wanted[name], shard[name]).is_contiguous(), name
        assert buffer.size_bytes == sum(storages(shard.values()).values()) == case.generation_bytes(rank)
        assert storages(parameters.values()).keys() <= storages(shard.values()).keys()
        del shard
        buffer.release()
        assert buffer.size_bytes == sum(storages(parameters.values()).values()) == case.training_bytes(rank)
        for name, value in case.training_shard(rank).items():
            assert torch.equal(parameters[name], value + update), name
        assert strides == {name: parameter.stride() for name, parameter in parameters.items()}


def there_and_back(_: dist.ProcessGroup, cases: Sequence[Case]) -> None:
    for case in cases:
        try:
            check_there_and_back(case)
        except BaseException as err:
            err.add_note(str(case))
            raise


@pytest.mark.parametrize("cases", [FOUR, EIGHT], ids=["4 ranks", "8 ranks"])
def test_a_rank_generates_with_its_shard_and_trains_on_in_its_own_part(cases: Sequence[Case]) -> None:
    spmd.run(cases[0].layout.num_ranks, there_and_back, cases)


def steps(_: dist.ProcessGroup, case: Case) -> None:
    buffer = case.buffer()
    ours = list(buffer.parameters.values())
    plain = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in ours]
    optimizers = [torch.optim.AdamW(found, lr=0.1, foreach=True) for found in (ours, plain)]
    for step in range(3):
        for mine, theirs in zip(ours, plain, strict=True):
            gradient = torch.arange(mine.numel()).remainder(7 + step).sub(3.0).view(mine.shape)
            mine.grad, theirs.grad = gradient.clone(), gradient
        for optimizer in optimizers:
            optimizer.step()
        with torch.inference_mode():
            assert not any(tensor.is_inference() for tensor in buffer.gather().values())
            buffer.release()
        for mine, theirs in zip(ours, plain, strict=True):
            assert not mine.is_inference()
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)  # vectors end elsewhere


def test_an_optimizer_steps_on_the_views_as_on_contiguous_parameters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it in the import that follows
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # imports much: once here, not in every fork
    spmd.run(2, steps, Case((1, 2, 1), (1, 1)))


def alone(_: dist.ProcessGroup, case: Case) -> None:
    buffer = case.buffer()
    before = {name: parameter.data_ptr() for name, parameter in buffer.parameters.items()}
    shard = buffer.gather()
    assert buffer.received_bytes == 0
    assert {name: tensor.data_ptr() for name, tensor in shard.items()} == before
    buffer.release()
    assert {name: parameter.data_ptr() for name, parameter in buffer.parameters.items()} == before


def test_nothing_is_copied_where_both_layouts_are_the_same() -> None:
    spmd.run(2, alone, Case((1, 2, 1), (1, 2)))


WIRE = (
    Case((2, 2, 1), (1, 1), num_layers=8, hidden=512, vocabulary=2400),
    Case((2, 4, 1), (2, 2), num_layers=8, hidden=512, vocabulary=2400),
    Case((1, 4, 2), (1, 2), num_layers=8, hidden=512, vocabulary=2400),
    Case((2, 4, 2), (2, 2), num_layers=8, hidden=512, vocabulary=2400),
)
"""Models of 21 M parameters."""


def on_the_wire(_: dist.ProcessGroup, case: Case) -> tuple[int, int]:
    buffer = case.buffer()
    dist.barrier()
    before = memory.received_bytes()
    buffer.gather()
    return buffer.received_bytes, memory.received_bytes() - before


@pytest.mark.parametrize("case", WIRE, ids=str)
def test_the_wire_carries_what_the_plan_says(case: Case) -> None:
    assert case.model_bytes >= 20e6 * case.dtype.itemsize
    for rank, (counted, wire) in enumerate(spmd.run(case.layout.num_ranks, on_the_wire, case)):
        plan = case.generation_bytes(rank) - case.training_bytes(rank)
        assert counted == plan
        # Each message of gloo has a header and a notification of 48 bytes: 6 to 18 KB were seen.
        assert plan <= wire <= plan + 32_000


def held(case: Case) -> None:
    rank = dist.get_rank()
    pg, tg = case.generate
    assert case.generation_bytes(rank) == pytest.approx(case.model_bytes / (pg * tg), rel=0.02)
    buffer = case.buffer()
    assert memory.settles_at(case.training_bytes(rank))
    with memory.Peak(transition) as gathering:
        shard = buffer.gather()
    assert memory.settles_at(case.generation_bytes(rank))
    del shard
    with memory.Peak(transition) as releasing:
        buffer.release()
    assert memory.settles_at(case.training_bytes(rank))
    largest = max(parameter.nbytes for parameter in buffer.parameters.values())
    for peak in (gathering, releasing):
        assert case.generation_bytes(rank) <= peak.size_bytes <= case.generation_bytes(rank) + largest


HELD = (
    Case((2, 2, 1), (1, 1), hidden=64),
    Case((1, 4, 1), (1, 2), hidden=64),
    Case((4, 1, 1), (2, 1), hidden=64),
    Case((1, 2, 2), (1, 1), hidden=64),
)


def all_held(_: dist.ProcessGroup, cases: Sequence[Case]) -> None:
    gc.freeze()  # what the fork brought along does not count
    for case in cases:
        held(case)
        gc.collect()


def test_a_rank_holds_nothing_twice() -> None:
    spmd.run(4, all_held, HELD)


def again_and_again(_: dist.ProcessGroup, case: Case) -> tuple[int, dict[str, int], dict[str, int]]:
    """Resident bytes that 20 transitions add, and what the process holds before and after them."""
    gc.freeze()  # what the fork brought along does not count
    buffer = case.buffer()

    def transitions(count: int) -> int:
        for _ in range(count):
            buffer.gather()
            buffer.release()
        assert memory.settles_at(case.training_bytes(dist.get_rank()))
        return memory.resident_bytes()

    resident, process = transitions(5), memory.held_by_process()
    return transitions(20) - resident, process, memory.held_by_process()


def test_twenty_transitions_leave_nothing() -> None:
    case = Case((2, 2, 1), (1, 1), hidden=128, vocabulary=512)
    for rank, (growth, before, after) in enumerate(spmd.run(4, again_and_again, case)):
        assert before == after
        assert growth < 20 * (case.generation_bytes(rank) - case.training_bytes(rank)) / 4
