"""Partial rollouts on devices of their own, from the data to the metrics, and over a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning import checkpoint as files
from rlhf_lightning.engines import Native
from rlhf_lightning.strategies import OneStepOff
from rlhf_lightning.workers import Settings
from tests.ray.carried import GROUP, SIZE, check, check_log_probs, run, watched

pytestmark = pytest.mark.usefixtures("cluster")


def test_answers_are_gone_on_with_by_the_next_weights(tiny: Path, tmp_path: Path) -> None:
    algorithm = watched(tiny, tmp_path)
    settings = Settings(generate=Native(refill=1))  # one row waits for no others to begin with it
    strategy = OneStepOff(max_staleness=2, generator_devices=2, settings=settings)
    metrics = run(algorithm, strategy, steps=10)
    check(algorithm.batches, metrics, 2)
    check_log_probs(algorithm)


def test_no_prompt_is_lost_over_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    before, after = watched(tiny, tmp_path / "before"), watched(tiny, tmp_path / "after")
    run(before, OneStepOff(max_staleness=3), steps=2)
    saved = str(tmp_path / "before" / "last.ckpt")
    assert files.read_state(Path(saved))["batch_size_in_flight"] == SIZE
    run(after, OneStepOff(max_staleness=3), steps=5, ckpt_path=saved)
    seen = [row for batch in (*before.batches, *after.batches) for row in batch["row_ids"].tolist()]
    assert len(seen) == len(set(seen)) == 5 * SIZE * GROUP
