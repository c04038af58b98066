"""Runs that repeat bit by bit, and that whoever asks for them is heard where the models are."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_lightning.algos import PPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import Deterministic, be_deterministic, deterministic_here, sampling
from rlhf_lightning.engines.determinism import cumulated_by_products
from rlhf_lightning.engines.sampling import sample, uniform
from rlhf_lightning.functional import Counts, PolicyLoss
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.workers import Actor, Critic, Reward, Settings
from tests.unit.algos.small import Keep, run, write_model

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Put back what the mode changes in this process."""
    state, environment = random.getstate(), os.environ.get(CUBLAS)
    numbers, benchmark = np.random.get_state(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    random.setstate(state)
    np.random.set_state(numbers)
    os.environ.pop(CUBLAS, None)
    if environment is not None:
        os.environ[CUBLAS] = environment


@dataclass(frozen=True)
class Noisy(PolicyLoss):
    """Draws from the process's own generator, as a user's loss may."""

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Loss`."""
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


@pytest.mark.parametrize("mode", [False, True, "warn"])
def test_the_mode_is_the_trainers_or_the_strategys(mode: Deterministic) -> None:
    assert Settings(deterministic=mode).completed().deterministic == mode
    torch.use_deterministic_algorithms(bool(mode), warn_only=mode == "warn")
    assert deterministic_here() == mode
    assert Settings().completed().deterministic == mode


def test_what_a_process_is_told() -> None:
    be_deterministic(False, seed=1)
    assert not torch.are_deterministic_algorithms_enabled()
    drawn = []
    for _ in range(2):
        be_deterministic(True, seed=2**40 + 7)
        drawn.append((random.getrandbits(32), np.random.rand(), float(torch.rand(()))))
    assert drawn[0] == drawn[1]
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ[CUBLAS] == ":4096:8"
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    be_deterministic("warn", seed=0)
    assert torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize("size", [1, 8, 255, 256, 257, 70_000])
def test_sums_by_products_are_those_of_a_scan(size: int) -> None:
    x = torch.rand(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    torch.testing.assert_close(cumulated_by_products(x), x.cumsum(-1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_draws_by_products_are_those_by_scans(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
    numbers = uniform(3, torch.arange(200), torch.tensor(0))
    plain = sample(logits, numbers, Sampling(top_p=top_p))
    monkeypatch.setattr(sampling, "cumulated", lambda x: cumulated_by_products(x.double()))
    assert torch.equal(sample(logits, numbers, Sampling(top_p=top_p))[0], plain[0])
