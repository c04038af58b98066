"""What is told to be deterministic repeats bit by bit on a GPU."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlhf_lightning.engines import FSDPEngine, NativeGenerator
from rlhf_lightning.engines.determinism import be_deterministic
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.spec import Sampling
from tests.gpu import ranks
from tests.unit.engines import tiny

ROWS, NEW = 48, 12


def rows() -> TensorDict:
    """Several groups of rows with one prompt each, so that prompts are shared."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, tiny.VOCABULARY, (ROWS // 4, tiny.PROMPT), generator=generator)
    columns = {
        "prompt_ids": ids.repeat_interleave(4, 0),
        "prompt_mask": torch.ones(ROWS, tiny.PROMPT, dtype=torch.bool),
        "row_ids": torch.arange(ROWS),
        "advantages": torch.randn(ROWS, NEW, generator=generator),
    }
    return TensorDict(columns, batch_size=ROWS)


def twice(device: torch.device, *, path: Path, dtype: tiny.Dtype) -> dict[str, torch.Tensor]:
    """Weights and answers of two runs from the same start."""
    be_deterministic(True, seed=1)
    warnings.filterwarnings("error", message=".*cannot be captured")
    found = {}
    for run in range(2):
        engine = FSDPEngine(tiny.spec(path, dtype=dtype), device=device)
        for step in range(2):
            with engine.generating() as decoder:
                native = NativeGenerator(
                    decoder, device=device, ends=Ends(pad_token_id=0, eos_token_ids=(3,))
                )
                answers = native.generate(rows(), sampling=Sampling(max_new_tokens=NEW, top_p=0.9), seed=step)
            learned = TensorDict({**rows(), **answers}, batch_size=ROWS)
            engine.accumulate(learned, tiny.Fit(), tiny.counts(), temperature=1.0)
            engine.optimizer_step()
            found[f"{run}.{step}.ids"] = answers["response_ids"]
            found[f"{run}.{step}.log_probs"] = answers["log_probs"]
        found[f"{run}.weights"] = engine.give_weights()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_runs_repeat_bit_by_bit(gpu: torch.device, tmp_path: Path, dtype: tiny.Dtype) -> None:
    (found,) = ranks.run(1, partial(twice, path=tiny.write_causal(tmp_path), dtype=dtype))
    for name, value in found.items():
        if name.startswith("0"):
            assert torch.equal(found[f"1{name[1:]}"], value), name
