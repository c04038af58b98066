"""Ranks of one model refuse to compute on different rows, and without the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.engines.training import TrainEngine
from rlhf_lightning.parallel import ParallelLayout, serving
from rlhf_lightning.spec import ModelSpec
from tests.unit import spmd
from tests.unit.engines import three_d, tiny
from tests.unit.engines.tiny import Fit

TENSOR, STAGES, DATA = ParallelLayout(t=2), ParallelLayout(p=2), ParallelLayout(d=2)


def engine_of(group: dist.ProcessGroup, name: str, layout: ParallelLayout, spec: ModelSpec) -> TrainEngine:
    """This rank's part of the model."""
    seat = three_d.seat(group, layout)
    if name == "megatron":
        return three_d.megatron(seat, spec, "lm")
    assert seat.groups is not None
    return FSDPEngine(spec, group=seat.groups.data, tensor=seat.groups.tensor)


def different(group: dist.ProcessGroup, name: str, layout: ParallelLayout, spec: ModelSpec) -> list[str]:
    """What each engine says to rows of the same lengths, some of whose tokens are others on each rank."""
    engine, rows = engine_of(group, name, layout, spec), tiny.rows()
    engine.infer(rows, temperature=1.0)
    rows["prompt_ids"] = torch.where(rows["prompt_mask"], 3 + group.rank(), rows["prompt_ids"])
    found = []
    for ask in (
        lambda: engine.infer(rows, temperature=1.0),
        lambda: engine.accumulate(rows, Fit(), tiny.counts(), temperature=1.0),
    ):
        with pytest.raises(ValueError, match=r"given different rows, .* Register .* transfer=DP") as caught:
            ask()
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize(
    ("name", "layout"), [("megatron", TENSOR), ("megatron", STAGES), ("fsdp", TENSOR)], ids=str
)
def test_different_rows_on_the_ranks_of_one_copy_are_refused(
    name: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    spec = tiny.spec(three_d.write(tmp_path, "qwen"))
    assert [len(said) for said in spmd.run(2, different, name, layout, spec)] == [2, 2]


def alone(group: dist.ProcessGroup, name: str, layout: ParallelLayout, spec: ModelSpec) -> str:
    """What the first rank says to a call of it alone."""
    engine = engine_of(group, name, layout, spec)
    if group.rank():
        return ""
    with serving("some"), pytest.raises(ValueError, match=r"not of all of them\. Register .*=DP") as caught:
        engine.infer(tiny.rows(), temperature=1.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "layout"), [("megatron", STAGES), ("fsdp", TENSOR), ("fsdp", DATA)], ids=str
)
def test_a_call_of_one_rank_does_not_wait_for_the_others(
    name: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    spec = tiny.spec(three_d.write(tmp_path, "qwen"))
    assert spmd.run(2, alone, name, layout, spec)[0].startswith("engine: the ranks of the model compute")
