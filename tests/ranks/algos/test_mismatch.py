"""How far generation and training are apart is logged on every step where both are computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import GRPO, PPO, ReinforcePP, ReMax
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import Native
from rlhf_lightning.spec import Sampling
from rlhf_lightning.workers import Actor, Reward, Settings
from tests.unit.algos.small import run, write_model

STEPS = 2


def mismatches(
    kind: type[RLHFAlgorithm], path: str, settings: Settings, *, again: bool
) -> list[float | None]:
    """What each step logs."""
    actor = Actor(path=path, sampling=Sampling(max_new_tokens=4), recompute_log_probs=again)
    options = {"group_size": 2} if kind is GRPO else {}
    algorithm = kind(actor=actor, reward=Reward(functions="length"), **options)
    data = TaskData(batch_size=6, num_rows=24, num_val_rows=0)
    kept = run(algorithm, data, steps=STEPS, settings=settings)
    return [numbers.get("actor/mismatch_kl") for numbers in kept.numbers]


@pytest.mark.parametrize("kind", [PPO, GRPO, ReMax, ReinforcePP])
def test_it_is_logged_without_a_correction(kind: type[RLHFAlgorithm], tmp_path: Path) -> None:
    rounding = Settings(generate=Native(cache_dtype="bfloat16"))
    found = mismatches(kind, write_model(tmp_path), rounding, again=True)
    assert len(found) == STEPS
    assert all(value is not None and value > 1e-10 for value in found)


def test_it_is_rounding_where_both_compute_alike_and_absent_where_one_computes(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    # k3 is half the square of a difference: of float32 rounding, and above of bfloat16's in the cache.
    exact = mismatches(PPO, path, Settings(), again=True)
    assert all(value is not None and 0 <= value < 1e-12 for value in exact)
    assert mismatches(PPO, path, Settings(), again=False) == [None] * STEPS
