"""vLLM on GPUs, one and two a copy, and beside a device without it, says what one CPU does."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("vllm")

from rlhf_lightning.engines import VLLM, FSDPEngine, GenerationEngine, generation_engine
from rlhf_lightning.engines.native.config import Native
from rlhf_lightning.parallel import Generation, ModelGroups, ParallelLayout, Seat
from rlhf_lightning.spec import ModelSpec, Sampling
from tests.extras import generating
from tests.gpu import ranks
from tests.unit.engines.decoders import table

WITHIN = 1e-3
"""Of log-probabilities: attention of other kernels."""
SMALL = VLLM(gpu_memory_utilization=0.2, max_num_seqs=16, kv_cache_gib=0.02)
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
LENGTHS = [3, 9, 1, 12, 140]


def said(engine: GenerationEngine, source: FSDPEngine) -> dict[str, Tensor]:
    """Answers before and after an update, between which the engine has slept."""
    found: dict[str, Tensor] = {}
    for step in range(2):
        rows = table(generating.prompts(LENGTHS))
        answers = engine.generate(rows, sampling=GREEDY, seed=3)
        found |= {f"{step}.{name}": answers[name] for name in ("response_ids", "log_probs")}
        engine.offload()
        generating.learn(source, generating.prompts([5, 3]))
    return found


def on_rank(device: torch.device, *, spec: ModelSpec, t: int, alone: bool) -> dict[str, Tensor]:
    """What one rank of a copy says; with `alone` the job has a last rank that never generates."""
    size = dist.get_world_size() - alone
    layout = ParallelLayout(t=t, d=size // t, generation=Generation(t=t))
    groups = ModelGroups.create_all(layout) if not alone else None
    if dist.get_rank() == size:
        return {}
    source = FSDPEngine(spec, device=device)  # of each rank its own: all learn the same
    seat = Seat(dist.get_rank(), layout, device, None, groups)
    return said(generation_engine(spec, source, seat=seat, ends=generating.ends(5), config=SMALL), source)


def stream(device: torch.device, *, spec: ModelSpec) -> dict[str, Tensor]:
    """Whether the current stream stays, as vLLM starts, answers and ends."""
    before, source = torch.cuda.current_stream(), FSDPEngine(spec, device=device)
    seat = Seat(dist.get_rank(), ParallelLayout(), device, None, None)
    engine = generation_engine(spec, source, seat=seat, ends=generating.ends(5), config=SMALL)
    started = torch.cuda.current_stream() == before
    said(engine, source)
    return {"started": torch.tensor(started), "answered": torch.tensor(torch.cuda.current_stream() == before)}


def test_the_current_stream_stays_torchs(tmp_path: Path) -> None:
    (found,) = ranks.run(1, partial(stream, spec=generating.write(tmp_path)))
    assert found["started"]
    assert found["answered"]


def crowded(device: torch.device, *, spec: ModelSpec) -> dict[str, Tensor]:
    """What vLLM says with a cache of a given size, where two thirds of the GPU are taken."""
    source = FSDPEngine(spec, device=device)
    seat = Seat(dist.get_rank(), ParallelLayout(), device, None, None)
    held = torch.empty(int(torch.cuda.mem_get_info()[0] * 2 / 3), dtype=torch.uint8, device=device)
    config = replace(SMALL, gpu_memory_utilization=0.9)
    found = said(generation_engine(spec, source, seat=seat, ends=generating.ends(5), config=config), source)
    return found | {"held": torch.tensor(held.nbytes)}


def test_a_cache_of_a_given_size_needs_no_share(tmp_path: Path) -> None:
    (found,) = ranks.run(1, partial(crowded, spec=generating.write(tmp_path)))
    assert found["1.response_ids"].shape[0] == len(LENGTHS)


def in_turn(device: torch.device, *, spec: ModelSpec) -> dict[str, Tensor]:
    """What two engines say, the second once the first was let go, as in a second run of a notebook."""
    found: dict[str, Tensor] = {}
    for turn in ("first", "second"):
        source = FSDPEngine(spec, device=device)
        seat = Seat(dist.get_rank(), ParallelLayout(), device, None, None)
        engine = generation_engine(spec, source, seat=seat, ends=generating.ends(5), config=SMALL)
        found |= {f"{turn}.{name}": value for name, value in said(engine, source).items()}
        del engine
        gc.collect()
    return found


def test_a_second_engine_sleeps_where_the_first_was_let_go(tmp_path: Path) -> None:
    (found,) = ranks.run(1, partial(in_turn, spec=generating.write(tmp_path)))
    for step in range(2):
        first, second = (found[f"{turn}.{step}.response_ids"] for turn in ("first", "second"))
        assert torch.equal(first, second)


@pytest.mark.parametrize(("world", "t", "alone"), [(1, 1, False), (2, 2, False), (2, 1, True)])
def test_vllm_says_what_one_cpu_does(world: int, t: int, alone: bool, tmp_path: Path) -> None:
    ranks.need(world)
    spec = generating.write(tmp_path)
    source = FSDPEngine(spec)
    seat = Seat(0, ParallelLayout(), torch.device("cpu"), None, None)
    ends = generating.ends(5)
    expected = said(generation_engine(spec, source, seat=seat, ends=ends, config=Native()), source)
    for found in filter(None, ranks.run(world, partial(on_rank, spec=spec, t=t, alone=alone))):
        assert torch.equal(found["0.response_ids"], expected["0.response_ids"])
        assert torch.equal(found["1.response_ids"], expected["1.response_ids"])
        torch.testing.assert_close(found["0.log_probs"], expected["0.log_probs"], atol=WITHIN, rtol=0)
        torch.testing.assert_close(found["1.log_probs"], expected["1.log_probs"], atol=WITHIN, rtol=0)
