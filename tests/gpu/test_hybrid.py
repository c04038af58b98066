"""The 3D-HybridEngine over NCCL, in every layout that NCCL can join ranks for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

pytest.importorskip("megatron.core")

from rlhf_lightning.engines import FSDPEngine, Megatron, NativeGenerator, TrainEngine
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.megatron.engine import MegatronEngine
from rlhf_lightning.parallel import Generation, ModelGroups, ParallelLayout, Seat
from rlhf_lightning.parallel.reshard import reshard
from rlhf_lightning.parallel.weights import Weights
from rlhf_lightning.spec import ModelSpec, Sampling
from tests.gpu import ranks
from tests.unit.engines import tiny

SAME = 1e-4
PAIRS = (
    ((1, 1, 1), (1, 1)),
    ((1, 2, 1), (1, 1)),
    ((2, 1, 1), (1, 1)),
    ((1, 1, 2), (1, 1)),
    ((1, 4, 1), (1, 2)),
    ((2, 2, 1), (1, 1)),
    ((1, 2, 2), (1, 1)),
    ((2, 2, 2), (1, 2)),
)
GREEDY = Sampling(max_new_tokens=6, temperature=0.0)


def prompts() -> TensorDict:
    rows = tiny.rows()
    columns = {"prompt_ids": rows["prompt_ids"], "prompt_mask": rows["prompt_mask"]}
    return TensorDict({**columns, "row_ids": torch.arange(len(rows))}, batch_size=len(rows))


def said(engine: TrainEngine, rows: TensorDict, device: torch.device) -> dict[str, torch.Tensor]:
    """Learn from rows, answer all prompts, and both again: what it says and becomes."""
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        engine.accumulate(rows, tiny.Fit(), tiny.counts(), temperature=1.0)
        engine.optimizer_step()
        with engine.generating() as decoder:
            native = NativeGenerator(decoder, device=device, ends=Ends(pad_token_id=0, eos_token_ids=(3,)))
            answers = native.generate(prompts(), sampling=GREEDY, seed=1)
            del decoder
        found |= {f"{step}.{name}": answers[name] for name in ("response_ids", "log_probs")}
    return found | {"weights": engine.give_weights()}


def on_rank(device: torch.device, *, spec: ModelSpec, layout: ParallelLayout) -> dict[str, torch.Tensor]:
    """What one rank of the 3D engine says, becomes, received and held."""
    groups, rank = ModelGroups.create_all(layout), dist.get_rank()
    seat = Seat(rank, layout, device, groups.data if layout.d > 1 else None, groups)
    engine = MegatronEngine(spec, head="lm", seat=seat, config=Megatron())
    found = said(engine, tiny.rows()[layout.coordinate(rank).d :: layout.d], device)
    weights = Weights(tuple(engine.conversion.parameters), engine.stages, element_bytes=4)
    planned, moved = reshard(weights, layout).ranks[rank], engine.transition()
    assert moved.received_bytes == planned.received_bytes
    return found


def in_bfloat16(device: torch.device, *, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """What one rank of the 3D engine scores, and says of what it drew."""
    layout = ParallelLayout(generation=Generation())
    seat = Seat(0, layout, device, None, ModelGroups.create_all(layout))
    engine = MegatronEngine(spec, head="lm", seat=seat, config=Megatron())
    found = {"scored": engine.infer(tiny.rows(), temperature=1.0)["log_probs"]}
    engine.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
    found["grad_norm"] = torch.tensor(engine.optimizer_step()["grad_norm"])
    with engine.generating() as decoder:
        native = NativeGenerator(decoder, device=device, ends=Ends(pad_token_id=0, eos_token_ids=(3,)))
        answers = native.generate(prompts(), sampling=Sampling(max_new_tokens=16), seed=1)
        del decoder
    again = engine.infer(TensorDict({**prompts(), **answers}, batch_size=len(answers)), temperature=1.0)
    return found | {"drawn": answers["log_probs"], "again": again["log_probs"]}


def test_bfloat16_is_near_float32(tmp_path: Path, gpu: torch.device) -> None:
    path = tiny.write_causal(tmp_path)
    exact = FSDPEngine(tiny.spec(path))
    expected = exact.infer(tiny.rows(), temperature=1.0)["log_probs"]
    exact.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
    (found,) = ranks.run(1, partial(in_bfloat16, spec=tiny.spec(path, dtype="bfloat16")))
    assert 0 < float((found["scored"] - expected).abs().max()) < 0.1
    assert float(found["grad_norm"]) == pytest.approx(exact.optimizer_step()["grad_norm"], rel=0.03)
    assert 0 < float((found["again"] - found["drawn"]).abs().max()) < 0.1


def step_bytes(device: torch.device, *, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """What a step takes beside what is there, once there are moments; and the bytes of the masters."""
    layout = ParallelLayout()
    seat = Seat(0, layout, device, None, ModelGroups.create_all(layout))
    engine = MegatronEngine(spec, head="lm", seat=seat, config=Megatron())
    for _ in range(2):
        engine.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.optimizer_step()
    taken = torch.cuda.max_memory_allocated() - before
    masters = 4 * sum(parameter.numel() for parameter in engine.shards.values())
    return {"taken": torch.tensor(taken), "masters": torch.tensor(masters)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_takes_no_copy_of_the_moments(dtype: tiny.Dtype, tmp_path: Path) -> None:
    spec = tiny.spec(tiny.write_causal(tmp_path, intermediate_size=4096, num_hidden_layers=8), dtype=dtype)
    (found,) = ranks.run(1, partial(step_bytes, spec=spec))
    assert found["taken"] < found["masters"] / 4


@pytest.mark.parametrize(("train", "generate"), PAIRS, ids=str)
def test_every_layout_learns_and_says_what_one_cpu_does(
    train: tuple[int, int, int], generate: tuple[int, int], tmp_path: Path
) -> None:
    p, t, d = train
    layout = ParallelLayout(p, t, d, generation=Generation(*generate))
    ranks.need(layout.num_ranks)
    spec = tiny.spec(tiny.write_causal(tmp_path))
    expected = said(FSDPEngine(spec), tiny.rows(), torch.device("cpu"))
    for found in ranks.run(layout.num_ranks, partial(on_rank, spec=spec, layout=layout)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=SAME, rtol=0)
