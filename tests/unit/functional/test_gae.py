from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import GAEEstimator, bootstrap_truncated, gae
from rlhf_lightning.functional.gae import check_discounts
from tests.unit.functional import slow
from tests.unit.functional.cases import close, mask_of, noise, valid
from tests.unit.functional.rows import laid_out

GAMMA, LAM = 0.9, 0.8


def slow_gae(rewards: Tensor, values: Tensor, mask: Tensor, tails: list[float]) -> Tensor:
    rows = zip(slow.rows_of(rewards, mask), slow.rows_of(values, mask), tails, strict=True)
    return laid_out(mask, [slow.gae(r, v, gamma=GAMMA, lam=LAM, tail=tail) for r, v, tail in rows])


def test_gae_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.7]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=0.5)
    # delta = [0.6 - 0.5, 0.7 - 0.6, 1 - 0.7]; A2 = 0.3, A1 = 0.1 + 0.5 * 0.3, A0 = 0.1 + 0.5 * 0.25
    close(advantages, [[0.225, 0.25, 0.3]])
    close(returns, [[0.725, 0.85, 1.0]])


def test_gae_with_a_lambda_for_each_row() -> None:
    mask = torch.ones(3, 5, dtype=torch.bool)
    rewards, values, lams = noise(mask, 0), noise(mask, 1), [0.2, 0.9, 1.0]
    found, _ = gae(rewards, values, mask, gamma=GAMMA, lam=torch.tensor(lams))
    for row, lam in enumerate(lams):
        close(found[row], gae(rewards, values, mask, gamma=GAMMA, lam=lam)[0][row])


def test_gae_gap_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.7]])
    mask = torch.tensor([[True, False, True]])
    # carried over the gap, A2 = 0.3 and A0 = 0.9 * 0.7 - 0.5 + 0.9 * 0.5 * 0.3
    close(gae(rewards, values, mask, gamma=0.9, lam=0.5)[0], [[0.265, 0.0, 0.3]])
    # with a step at 0 in between, A1 = 0.9 * 0.7 + 0.45 * 0.3 (not returned) and A0 = 0 - 0.5 + 0.45 * A1
    close(gae(rewards, values, mask, gamma=0.9, lam=0.5, gap="zero")[0], [[-0.15575, 0.0, 0.3]])


def test_bootstrap_starts_from_the_last_value(case: str) -> None:
    mask = mask_of(case)
    rewards, values = noise(mask, 0), noise(mask, 1)
    truncated = torch.tensor([True, True, False, False])
    last = [valid(mask, b)[-1:] for b in range(len(mask))]
    tails = [float(values[b, t[0]]) if t and bool(truncated[b]) else 0.0 for b, t in enumerate(last)]
    longer = bootstrap_truncated(rewards, values, mask, truncated=truncated, gamma=GAMMA)
    advantages, returns = gae(longer, values, mask, gamma=GAMMA, lam=LAM)
    close(advantages, slow_gae(rewards, values, mask, tails))
    close(returns, torch.where(mask, advantages + values, 0.0))


def test_no_rows() -> None:
    empty, mask = torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool)
    assert gae(empty, empty, mask, gamma=1.0, lam=1.0)[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("discounts", "said"),
    [
        ({"gamma": 0.9, "lam": 1.1}, r"Mine\(lam=1\.1\): must lie within \[0, 1\]\. Try lam=1\.0\.$"),
        ({"gamma": 0.9, "lam": -0.1}, r"Mine\(lam=-0\.1\): must"),
        ({"gamma": 1.1}, r"Mine\(gamma=1\.1\): must .* Try gamma=1\.0\.$"),
        ({"gamma": -0.1, "lam": 1.0}, r"Mine\(gamma=-0\.1\): must"),
    ],
)
def test_discounts_out_of_range_are_refused(discounts: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        check_discounts("Mine", **discounts)
    for lam in (0.0, 1.0):
        check_discounts("Mine", gamma=1.0, lam=lam)


@pytest.mark.parametrize(
    ("lam", "said"),
    [
        (-0.1, r"gae\(lam=-0\.1\): must lie within \[0, 1\]\. Try lam=1\.0\.$"),
        (torch.tensor([0.5, 1 - 1 / (0.05 * 8)]), r"gae\(lam=tensor from -1\.5 to 0\.5\): .* Try lam\.clamp"),
        (torch.tensor([float("nan"), 1.0]), r"gae\(lam=tensor from nan to nan\): must"),
        (torch.full((2, 1), 0.5), r"gae\(lam=tensor \[2, 1\]\): takes one number for each of the 2 rows\.$"),
    ],
)
def test_a_lambda_that_cannot_be_is_refused(lam: float | torch.Tensor, said: str) -> None:
    """That of VAPO is negative for answers of less than 20 tokens: advantages grew with each token."""
    x, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"^{said}"):
        gae(x, x, mask, gamma=1.0, lam=lam)
    edges = gae(x, x, mask, gamma=1.0, lam=torch.tensor([0.0, 1.0]))
    assert torch.equal(edges[0][0], gae(x, x, mask, gamma=1.0, lam=0.0)[0][0])
    assert torch.equal(edges[0][1], gae(x, x, mask, gamma=1.0, lam=1.0)[0][1])


def test_an_estimator_has_one_lambda() -> None:
    with pytest.raises(ValueError, match=r"^GAEEstimator\(lam=tensor \[2\]\): one number .* `gae` of"):
        GAEEstimator(lam=cast(float, torch.ones(2)))
