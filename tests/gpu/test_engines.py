"""An engine computes on a GPU what it computes on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlhf_lightning.engines import PARTS, FSDPEngine, Native, NativeGenerator, TrainEngine
from rlhf_lightning.spec import Sampling
from tests.unit.engines import tiny

SAME = 1e-4
"""float32, in another order, without TensorFloat-32."""
STEPS = 3
PROMPTS, NEW = 24, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_causal(tmp_path_factory.mktemp("model"))


def learned(engine: TrainEngine) -> torch.Tensor:
    for _ in range(STEPS):
        engine.accumulate(tiny.rows(), tiny.Fit(), tiny.counts(), temperature=1.0)
        assert engine.optimizer_step()["grad_norm"] > 0
    return engine.give_weights()


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_fsdp_learns_the_same(model: Path, gpu: torch.device, gradient_checkpointing: bool) -> None:
    spec = tiny.spec(model, gradient_checkpointing=gradient_checkpointing)
    here, there = FSDPEngine(spec), FSDPEngine(spec, device=gpu)
    found = [engine.infer(tiny.rows(), temperature=0.7, entropy=True) for engine in (here, there)]
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(found[1][name], found[0][name], atol=SAME, rtol=0)
    torch.testing.assert_close(learned(there), learned(here), atol=SAME, rtol=0)


def test_bfloat16_is_near_float32(model: Path, gpu: torch.device) -> None:
    exact = FSDPEngine(tiny.spec(model)).infer(tiny.rows(), temperature=1.0)["log_probs"]
    rough = FSDPEngine(tiny.spec(model, dtype="bfloat16"), device=gpu)
    found = rough.infer(tiny.rows(), temperature=1.0)["log_probs"]
    assert found.dtype == torch.float32
    assert 0 < float((found - exact).abs().max()) < 0.1
    learned(rough)


@pytest.mark.parametrize("slots", [0, 5])
def test_generation_says_the_same(model: Path, gpu: torch.device, slots: int) -> None:
    generator = torch.Generator().manual_seed(3)
    columns = {
        "prompt_ids": torch.randint(4, tiny.VOCABULARY, (PROMPTS, tiny.PROMPT), generator=generator),
        "prompt_mask": torch.arange(tiny.PROMPT) >= torch.arange(PROMPTS)[:, None] % tiny.PROMPT,
        "row_ids": torch.arange(PROMPTS),
    }
    rows = TensorDict(columns, batch_size=PROMPTS)
    said = []
    for device in (torch.device("cpu"), gpu):
        with FSDPEngine(tiny.spec(model), device=device).generating() as decoder:
            native = NativeGenerator(
                decoder, device=device, pad_token_id=0, eos_token_ids=(3,), config=Native(slots=slots)
            )
            said.append(native.generate(rows, sampling=Sampling(max_new_tokens=NEW), seed=5))
    assert torch.equal(said[0]["response_mask"], said[1]["response_mask"])
    assert torch.equal(said[0]["response_ids"], said[1]["response_ids"])
    torch.testing.assert_close(said[1]["log_probs"], said[0]["log_probs"], atol=SAME, rtol=0)


def test_what_is_offloaded_leaves_the_gpu(model: Path, gpu: torch.device) -> None:
    engine = FSDPEngine(tiny.spec(model), device=gpu)
    before = learned(engine)
    sizes, held = engine.memory(), torch.cuda.memory_allocated(gpu)
    engine.offload(PARTS)
    freed = held - torch.cuda.memory_allocated(gpu)
    assert freed >= sum(sizes[part] for part in ("parameters", "optimizer")) > 0
    engine.reload(PARTS)
    assert torch.equal(engine.give_weights(), before)
    learned(engine)
