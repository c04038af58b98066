from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from rlhf_lightning.functional import KLKind, adapted_kl_coef, kl_columns, kl_estimate, penalized_rewards
from tests.unit.functional.cases import close, mask_of, noise, valid


def test_by_hand() -> None:
    log_probs, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])  # d = 0.5, -1
    close(kl_estimate(log_probs, ref, "k1"), [[0.5, -1.0]])
    close(kl_estimate(log_probs, ref, "k2"), [[0.125, 0.5]])
    close(kl_estimate(log_probs, ref, "k3"), [[0.1065306597, 0.7182818285]])  # e^-0.5 - 0.5, e - 2


@pytest.mark.parametrize(
    ("kind", "slope"), [("k1", 1.0), ("k2", 0.7), ("k3", 1 - math.exp(-0.7)), ("k1+", 0.7), ("k3+", 0.7)]
)
def test_gradients(kind: KLKind, slope: float) -> None:
    log_probs = torch.tensor([[-1.0, -torch.inf]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    kl = kl_estimate(log_probs, torch.tensor([[-1.7, torch.nan]]), kind, mask=mask)
    torch.autograd.backward(kl.sum())
    assert log_probs.grad is not None
    close(log_probs.grad, [[slope, 0.0]])


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_gradient_of_k2_leaves_the_value_as_it_is(kind: Literal["k1", "k3"]) -> None:
    log_probs, ref = torch.tensor([-0.3, -90.0, -0.7, -1e4]), torch.tensor([-1.1, -0.2, -800.0, -0.1])
    plus: KLKind = "k1+" if kind == "k1" else "k3+"
    assert torch.equal(kl_estimate(log_probs, ref, plus), kl_estimate(log_probs, ref, kind))


def test_estimates_agree_with_the_divergence() -> None:
    p, q = torch.tensor([0.2, 0.3, 0.5]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
    truth = float((p.exp() * (p - q)).sum())
    for kind in ("k1", "k3"):  # unbiased: their expectation under p is the divergence itself
        assert float((p.exp() * kl_estimate(p, q, kind)).sum()) == pytest.approx(truth, abs=1e-7)


def kl_gradient(log_probs: torch.Tensor, ref: torch.Tensor, kind: KLKind) -> torch.Tensor:
    leaf = log_probs.clone().requires_grad_()
    return torch.autograd.grad(kl_estimate(leaf, ref, kind).sum(), leaf)[0]


@pytest.mark.parametrize("kind", ["k3", "k3+"])
def test_clamps(kind: Literal["k3", "k3+"]) -> None:
    log_probs = torch.tensor([-200.0, -5.0, 0.0])
    ref = torch.tensor([0.0, 0.0, -200.0])  # d = -200, -5, 200
    close(kl_estimate(log_probs, ref, kind), [10.0, 10.0, 10.0])
    assert torch.isfinite(kl_gradient(log_probs, ref, kind)).all()


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kind='k4'.*Try 'k1'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


def test_penalized_rewards() -> None:
    mask = torch.tensor([[True, True, False]])
    scores, kl = torch.tensor([[0.0, 1.0, torch.nan]]), torch.tensor([[0.5, -0.25, torch.inf]])
    close(penalized_rewards(scores, kl, mask, coef=0.1), [[-0.05, 1.025, 0.0]])


def test_columns_of_the_divergence(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    kl = kl_estimate(noise(mask, 0, dtype=dtype), noise(mask, 1, dtype=dtype), mask=mask)
    found = kl_columns(kl, mask)
    assert found["kl"] is kl
    rows = [[float(kl[b, t]) for t in valid(mask, b)] for b in range(len(mask))]
    close(found["row_kl"], [sum(row) / max(len(row), 1) for row in rows])


def test_adapted_kl_coef() -> None:
    def move(current: float) -> float:
        return adapted_kl_coef(0.2, current=current, target=6.0, horizon=1000.0, num_rows=100)

    assert move(6.0) == pytest.approx(0.2)
    assert move(6.6) == pytest.approx(0.2 * 1.01)
    assert move(60.0) == pytest.approx(0.2 * 1.02)  # clipped at +20%
    assert move(0.0) == pytest.approx(0.2 * 0.98)
    assert adapted_kl_coef(1.0, current=0.2, target=0.1, horizon=1.0, num_rows=1) == pytest.approx(1.2)
    for target, horizon in ((0.0, 10.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="must be above 0"):
            adapted_kl_coef(0.2, current=1.0, target=target, horizon=horizon, num_rows=1)


def test_a_horizon_of_a_fifth_of_the_rows_would_turn_the_penalty_into_a_reward() -> None:
    assert adapted_kl_coef(0.2, current=0.0, target=6.0, horizon=101.0, num_rows=500) > 0
    with pytest.raises(ValueError, match=r"horizon=100.0, num_rows=500.*Try a horizon of at least 500"):
        adapted_kl_coef(0.2, current=6.0, target=6.0, horizon=100.0, num_rows=500)
