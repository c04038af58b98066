"""Runs that repeat bit by bit where they are asked to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_lightning.algos import PPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import Counts, PolicyLoss
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.workers import Actor, Critic, Reward, Settings
from tests.unit.algos.small import Keep, run, write_model

pytestmark = pytest.mark.usefixtures("deterministic_as_before")


@dataclass(frozen=True)
class Noisy(PolicyLoss):
    """Draws from the process's own generator, as a user's loss may."""

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().__call__(outputs, rows, counts)
        return loss * (1 + torch.rand(())), metrics


def learned(path: str, settings: Settings, *, loss: PolicyLoss) -> dict[str, Tensor]:
    optimizer = OptimizerSpec(lr=1e-3, grad_clip=0.0)
    algorithm = PPO(
        actor=Actor(path=path, optimizer=optimizer, sampling=Sampling(max_new_tokens=6)),
        critic=Critic(optimizer=optimizer),
        reward=Reward(functions="length"),
        policy_loss=loss,
        mini_batch_size=2,
    )
    data = TaskData(batch_size=6, num_rows=24, num_val_rows=0)
    kept: Keep = run(algorithm, data, steps=3, settings=settings)
    return {f"{role}.{n}": w for role, weights in kept.weights.items() for n, w in weights.items()}


def test_runs_repeat_bit_by_bit(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    first, second = (learned(path, Settings(deterministic=True), loss=Noisy()) for _ in range(2))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    torch.use_deterministic_algorithms(False)
    third, fourth = (learned(path, Settings(), loss=Noisy()) for _ in range(2))
    assert not all(torch.equal(weight, fourth[name]) for name, weight in third.items())


def test_the_mode_changes_no_number_of_ours(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    plain = learned(path, Settings(), loss=PolicyLoss())
    told = learned(path, Settings(deterministic=True), loss=PolicyLoss())
    for name, weight in plain.items():
        torch.testing.assert_close(told[name], weight, rtol=0, atol=1e-6)
