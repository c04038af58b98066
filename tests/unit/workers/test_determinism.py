"""Whoever asks for runs that repeat bit by bit is heard where the models are, and draws and sums repeat."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from rlhf_lightning.engines import Deterministic, be_deterministic, deterministic_here, sampling
from rlhf_lightning.engines.determinism import cumulated_by_products
from rlhf_lightning.engines.sampling import sample, uniform
from rlhf_lightning.spec import Sampling
from rlhf_lightning.workers import Settings
from tests.conftest import CUBLAS

pytestmark = pytest.mark.usefixtures("deterministic_as_before")


@pytest.mark.parametrize("mode", [False, True, "warn"])
def test_the_mode_is_the_trainers_or_the_strategys(mode: Deterministic) -> None:
    assert Settings(deterministic=mode).completed().deterministic == mode
    torch.use_deterministic_algorithms(bool(mode), warn_only=mode == "warn")
    assert deterministic_here() == mode
    assert Settings().completed().deterministic == mode


def test_a_process_becomes_deterministic() -> None:
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
