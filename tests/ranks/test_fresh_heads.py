"""Fresh heads of models that Megatron divides: by seed, and the same however the model is divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.engines.huggingface.adapter_files import HEAD
from rlhf_lightning.engines.megatron.engine import MegatronEngine
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.spec import ModelSpec
from rlhf_lightning.workers import Reward
from tests.unit import spmd
from tests.unit.engines import three_d, tiny

SEEDS = (3, 4)
LAYOUTS = (ParallelLayout(2, 2, 1), ParallelLayout(1, 2, 2), ParallelLayout(2, 1, 2))
OUTPUT = "output_layer.weight"


def heads(group: dist.ProcessGroup, specs: list[ModelSpec]) -> list[tuple[ParallelLayout, int, Tensor]]:
    """What this rank has of each head, where it has the last stage."""
    found = []
    for layout in LAYOUTS:
        seat = three_d.seat(group, layout)
        for number, spec in enumerate(specs):
            shards = MegatronEngine(spec, head="scalar", seat=seat).shards
            assert (OUTPUT in shards) == (layout.coordinate(seat.rank).p == layout.p - 1)
            if OUTPUT in shards:
                found.append((layout, number, shards[OUTPUT].detach().clone()))
    return found


def refused(group: dist.ProcessGroup, judge: Reward) -> list[str]:
    """What is said of a reward model in each layout, where the last stage is on this rank."""
    found = []
    for layout in LAYOUTS:
        seat = three_d.seat(group, layout)
        try:
            MegatronEngine(judge, head="reward", seat=seat)
        except ValueError as err:
            found.append(str(err))
    return found


def test_a_head_that_nothing_trains_is_not_made_up(tmp_path: Path) -> None:
    path = three_d.write(tmp_path, "qwen")
    found = [said for rank in spmd.run(4, refused, Reward(path=str(path))) for said in rank]
    assert len(found) == sum(4 // layout.p for layout in LAYOUTS)
    assert all(
        "score.weight, the head of a reward, cost or value model, and a fresh one would" in s for s in found
    )


@pytest.mark.parametrize("weights", [True, False], ids=["of-a-language-model", "of-nothing"])
def test_a_head_depends_on_its_seed_alone(tmp_path: Path, *, weights: bool) -> None:
    path = three_d.write(tmp_path, "qwen")
    if not weights:
        (path / "model.safetensors").unlink()
    specs = [replace(tiny.spec(path), init_seed=seed) for seed in SEEDS]
    expected = [three_d.fsdp(spec, "scalar")._weights.masters[HEAD].detach() for spec in specs]
    assert not torch.equal(*expected)
    found = [head for rank in spmd.run(4, heads, specs) for head in rank]
    assert len(found) == len(SEEDS) * sum(4 // layout.p for layout in LAYOUTS)
    for layout, number, head in found:
        assert torch.equal(head, expected[number]), layout
