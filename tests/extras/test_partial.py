"""Partial rollouts with vLLM as a generator of its own: paused, and gone on with by the next weights."""

from __future__ import annotations

from pathlib import Path

from rlhf_lightning.strategies import OneStepOff
from rlhf_lightning.workers import Settings
from tests.extras.generating import SMALL
from tests.extras.test_vllm_fit import write_model
from tests.ray.carried import check, check_log_probs, run, watched


def test_answers_are_gone_on_with_by_the_next_weights(tmp_path: Path) -> None:
    algorithm = watched(write_model(tmp_path), tmp_path)
    settings = Settings(generator="vllm", vllm=SMALL)
    metrics = run(algorithm, OneStepOff(max_staleness=2, settings=settings), steps=6)
    check(algorithm.batches, metrics, 2)
    check_log_probs(algorithm)
