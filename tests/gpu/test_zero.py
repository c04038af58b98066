"""The DeepSpeed engine trains and generates on a GPU as the FSDP engine does on a CPU."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("deepspeed")

from rlhf_lightning.engines import FSDPEngine, TrainEngine, ZeRO
from rlhf_lightning.engines.deepspeed.engine import ZeROEngine
from rlhf_lightning.parallel import ModelGroups, ParallelLayout, Seat
from rlhf_lightning.spec import ModelSpec
from tests.gpu import ranks
from tests.gpu.test_hybrid import said
from tests.unit.engines import tiny

SAME = 1e-4
CONFIGS = {
    "stage 1": ZeRO(stage=1),
    "stage 2": ZeRO(stage=2),
    "stage 3": ZeRO(stage=3, whole_below=0),
    "stage 2, moments on the host": ZeRO(stage=2, offload_optimizer=True),
    "stage 3, all on the host": ZeRO(stage=3, whole_below=0, offload_optimizer=True, offload_parameters=True),
}


def engine_of(config: ZeRO, spec: ModelSpec, device: torch.device) -> ZeROEngine:
    layout = ParallelLayout(d=dist.get_world_size())
    seat = Seat(dist.get_rank(), layout, device, None, ModelGroups.create_all(layout))
    return ZeROEngine(spec, seat=seat, config=config)


def all_configs(device: torch.device, *, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """What each says and becomes, in one process: DeepSpeed takes long to be imported."""
    own = tiny.rows()[dist.get_rank() :: dist.get_world_size()]
    found: dict[str, torch.Tensor] = {}
    for name, config in CONFIGS.items():
        parts = said(engine_of(config, spec, device), own, device)
        found |= {f"{name}.{part}": value for part, value in parts.items()}
    return found


def memory(engine: TrainEngine, device: torch.device) -> torch.Tensor:
    """[2] bytes that are freed as all goes to the host, and that it says it has."""
    engine.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
    engine.optimizer_step()
    held, sizes = torch.cuda.memory_allocated(device), engine.memory()
    engine.offload(("parameters", "optimizer"))
    freed = held - torch.cuda.memory_allocated(device)
    engine.reload(("parameters", "optimizer"))
    engine.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
    return torch.tensor([freed, sizes["parameters"] + sizes["optimizer"]])


def all_memory(device: torch.device, *, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """`memory` of each stage."""
    return {f"{stage}": memory(engine_of(ZeRO(stage=stage), spec, device), device) for stage in (1, 2, 3)}


@pytest.mark.parametrize("world", [1, 2])
def test_every_stage_learns_and_says_what_a_cpu_does(world: int, gpu: torch.device, tmp_path: Path) -> None:
    """On one GPU a stage divides nothing, and nothing overlaps."""
    ranks.need(world)
    spec = tiny.spec(tiny.write_causal(tmp_path), eps=1e-4)
    expected = said(FSDPEngine(spec), tiny.rows(), torch.device("cpu"))
    for found in ranks.run(world, partial(all_configs, spec=spec)):
        for name, part in product(CONFIGS, expected):
            same = partial(torch.testing.assert_close, atol=SAME, rtol=0, msg=f"{name} {part}")
            same(found[f"{name}.{part}"], expected[part])


def test_what_is_offloaded_leaves_the_gpu(gpu: torch.device, tmp_path: Path) -> None:
    spec = tiny.spec(tiny.write_causal(tmp_path), dtype="bfloat16")
    (found,) = ranks.run(1, partial(all_memory, spec=spec))
    for freed, said_to_be_there in found.values():
        assert freed >= 0.9 * said_to_be_there > 0
