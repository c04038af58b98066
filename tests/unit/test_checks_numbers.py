"""Numbers of an algorithm that are too small, and the smallest that are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import GRPO, PPO, RLOO, SafeRLHF
from rlhf_lightning.workers import Cost
from tests.unit.algos.short import refusal


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: PPO(epochs=0), "epochs=0: nothing would be learned. Give at least 1."),
        (lambda: PPO(mini_batch_size=-1), "mini_batch_size=-1: nothing would be learned. Give at least 0."),
        (
            lambda: PPO(critic_warmup_steps=-2),
            "critic_warmup_steps=-2: is not a number of iterations. Give at ",
        ),
        (lambda: RLOO(reward_kl_coef=-0.05), "reward_kl_coef=-0.05: what leaves the reference would be rew"),
        (lambda: PPO(stop_kl=-1.0), "stop_kl=-1.0: no divergence is below 0, so the actor would pause after"),
        (lambda: SafeRLHF(multiplier_lr=-0.1), "multiplier_lr=-0.1: the cost would weigh less where it is"),
    ],
)
def test_numbers_that_are_too_small(make: Callable[[], RLHFAlgorithm], told: str, tmp_path: Path) -> None:
    assert refusal(make(), tmp_path).startswith(told)


def test_numbers_that_are_just_large_enough(tmp_path: Path) -> None:
    safe = SafeRLHF(multiplier_lr=0.0, cost=Cost(functions="length"))
    for algorithm in (GRPO(reward_kl_coef=0.0), PPO(stop_kl=0.0), safe):
        assert refusal(algorithm, tmp_path) == "started"
