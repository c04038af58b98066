"""vLLM answers with the merged weights of an adapted actor, from the first answer on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.spec import LoRA, Sampling
from tests.extras import generating
from tests.extras.generating import EXACT, prompts, vllm_of
from tests.unit.engines.decoders import table


def test_answers_follow_the_adapters(tmp_path: Path) -> None:
    spec = generating.write(tmp_path / "base", "qwen2")
    earlier = FSDPEngine(replace(spec, lora=LoRA(rank=4)))
    generating.learn(earlier, prompts([9]))
    earlier.export_adapters(tmp_path / "adapters")
    source = FSDPEngine(replace(spec, lora=LoRA(rank=4, path=str(tmp_path / "adapters"))))
    engine = vllm_of(source, spec)
    sampling, sequences = Sampling(max_new_tokens=8), prompts([12, 5, 30])
    try:
        found = []
        for step in range(2):
            out = engine.generate(table(sequences), sampling=sampling, seed=1)
            plain = generating.exported(source, tmp_path / f"merged-{step}")
            expected = generating.judged(plain, sequences, out, sampling)
            torch.testing.assert_close(out["log_probs"], expected, atol=EXACT, rtol=0)
            found.append(out["log_probs"])
            generating.learn(source, prompts([5, 3]))
        assert float((found[0] - found[1]).abs().max()) > 10 * EXACT
    finally:
        engine.close()
