"""Turns of an environment with vLLM as the generator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Settings
from tests.extras.generating import SMALL
from tests.extras.test_vllm_fit import write_model
from tests.ray.talking import gaps, learn


@pytest.mark.parametrize("zero_copy", [True, False])
def test_log_probs_are_of_the_tokens_in_their_place(zero_copy: bool, tmp_path: Path) -> None:
    settings = Settings(generator="vllm", vllm=replace(SMALL, zero_copy=zero_copy))
    model = Path(write_model(tmp_path / "model"))
    batches, _ = learn(Local(settings=settings), model, tmp_path / "run", recompute_log_probs=True)
    assert {gap for batch in batches for gap in gaps(batch)} == {0, 1, 2}
    for batch in batches:
        mask, drawn = batch["response_mask"], batch["rollout_log_probs"]
        assert (drawn[mask] < 0).all()
        assert not drawn[~mask].any()
        assert torch.allclose(drawn[mask], batch["log_probs"][mask], atol=1e-4)
