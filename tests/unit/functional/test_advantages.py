from __future__ import annotations

import math
import statistics
from typing import Literal

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import (
    bootstrap_truncated,
    explained_variance,
    gae,
    group_advantages,
    spread,
    whiten,
)
from tests.unit.functional.cases import close, mask_of, noise, valid

GAMMA, LAM = 0.9, 0.8


def slow_gae(rewards: Tensor, values: Tensor, mask: Tensor, tails: list[float]) -> Tensor:
    """Sum of (gamma lam)^k delta_{t+k} over the valid tokens alone, as if masked ones did not exist."""
    out = torch.zeros(mask.shape)
    for b in range(len(mask)):
        places = valid(mask, b)
        v = [float(values[b, t]) for t in places] + [tails[b]]
        delta = [float(rewards[b, t]) + GAMMA * v[i + 1] - v[i] for i, t in enumerate(places)]
        for i, t in enumerate(places):
            out[b, t] = sum((GAMMA * LAM) ** k * d for k, d in enumerate(delta[i:]))
    return out


def slow_gae_zero(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Every position is a step; rewards and values are 0 at masked ones."""
    out = torch.zeros(mask.shape)
    width = mask.shape[1]
    for b in range(len(mask)):
        m = [float(mask[b, t]) for t in range(width)]
        r = [float(rewards[b, t]) if m[t] else 0.0 for t in range(width)]
        v = [float(values[b, t]) if m[t] else 0.0 for t in range(width)] + [0.0]
        delta = [r[t] + GAMMA * v[t + 1] - v[t] for t in range(width)]
        for t in range(width):
            out[b, t] = m[t] * sum((GAMMA * LAM) ** (s - t) * delta[s] for s in range(t, width))
    return out


def test_gae_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.7]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=0.5)
    # delta = [0.6 - 0.5, 0.7 - 0.6, 1 - 0.7]; A2 = 0.3, A1 = 0.1 + 0.5 * 0.3, A0 = 0.1 + 0.5 * 0.25
    close(advantages, [[0.225, 0.25, 0.3]])
    close(returns, [[0.725, 0.85, 1.0]])


def test_gae_gap_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.7]])
    mask = torch.tensor([[True, False, True]])
    # carried over the gap, A2 = 0.3 and A0 = 0.9 * 0.7 - 0.5 + 0.9 * 0.5 * 0.3
    close(gae(rewards, values, mask, gamma=0.9, lam=0.5)[0], [[0.265, 0.0, 0.3]])
    # with a step at 0 in between, A1 = 0.9 * 0.7 + 0.45 * 0.3 (not returned) and A0 = 0 - 0.5 + 0.45 * A1
    close(gae(rewards, values, mask, gamma=0.9, lam=0.5, gap="zero")[0], [[-0.15575, 0.0, 0.3]])


def test_gae_against_loops(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    rewards, values = noise(mask, 0, dtype=dtype), noise(mask, 1, dtype=dtype)
    advantages, returns = gae(rewards, values, mask, gamma=GAMMA, lam=LAM)
    close(advantages, slow_gae(rewards, values, mask, [0.0] * len(mask)))
    close(returns, torch.where(mask, advantages + values.float(), 0.0))
    zero, _ = gae(rewards, values, mask, gamma=GAMMA, lam=LAM, gap="zero")
    close(zero, slow_gae_zero(rewards, values, mask))


@pytest.mark.parametrize("gap", ["carry", "zero"])
def test_right_padding_does_not_matter(gap: Literal["carry", "zero"]) -> None:
    full = torch.ones(2, 3, dtype=torch.bool)
    padded = torch.tensor([[1, 1, 1, 0, 0]] * 2, dtype=torch.bool)
    rewards, values = noise(padded, 0), noise(padded, 1)
    long = gae(rewards, values, padded, gamma=GAMMA, lam=LAM, gap=gap)[0]
    short = gae(rewards[:, :3], values[:, :3], full, gamma=GAMMA, lam=LAM, gap=gap)[0]
    assert torch.equal(long[:, :3], short)


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


def test_whiten_against_python(case: str, dtype: torch.dtype) -> None:
    mask = mask_of(case)
    x = noise(mask, 3, dtype=dtype, scale=3.0)
    flat = [float(x[b, t]) for b in range(len(mask)) for t in valid(mask, b)]
    for unbiased, variance in ((True, statistics.variance), (False, statistics.pvariance)):
        expected = torch.zeros(mask.shape)
        if len(flat) > 1:
            mean, scale = statistics.fmean(flat), 1 / math.sqrt(variance(flat) + 1e-8)
            for b in range(len(mask)):
                for t in valid(mask, b):
                    expected[b, t] = (float(x[b, t]) - mean) * scale
        close(whiten(x, mask, unbiased=unbiased), expected)


def test_whiten_by_hand() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    x = torch.tensor([[1.0, 2.0], [3.0, 99.0]])
    close(whiten(x, mask), [[-1.0, 0.0], [1.0, 0.0]])  # unbiased variance 1
    root = math.sqrt(1.5)  # biased variance 2/3
    close(whiten(x, mask, unbiased=False), [[-root, 0.0], [root, 0.0]])


def test_group_advantages_by_hand() -> None:
    scores = torch.tensor([1.0, 5.0, 3.0, 7.0, 0.1, 0.1, 0.1, 4.0])
    groups = torch.tensor([10, 30, 10, 30, 20, 20, 20, 40])  # interleaved; zero variance; one alone
    half = math.sqrt(0.5)  # deviation 1 over the unbiased standard deviation sqrt(2)
    close(group_advantages(scores, groups), [-half, -half, half, half, 0, 0, 0, 0])
    close(group_advantages(scores, groups, scale="none"), [-1, -1, 1, 1, 0, 0, 0, 0])
    assert group_advantages(scores, groups, single="score")[-1] == pytest.approx(4 / (1 + 1e-6))
    assert group_advantages(scores, groups, single="score", scale="none")[-1] == 4


@pytest.mark.parametrize("eps", [1e-6, 1e-4, 1e-9])
def test_group_advantages_against_python(eps: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(12, generator=generator).to(dtype)
    groups = torch.randint(0, 5, (12,), generator=generator)
    counts = torch.rand(12, generator=generator) > 0.2
    expected = []
    for i in range(12):
        same = [float(scores[j]) for j in range(12) if groups[j] == groups[i] and counts[j]]
        if not counts[i] or len(same) < 2:
            expected.append(0.0)
        else:
            expected.append((float(scores[i]) - statistics.fmean(same)) / (statistics.stdev(same) + eps))
    close(group_advantages(scores, groups, valid=counts, eps=eps), expected)


def test_equal_scores_give_exactly_zero() -> None:
    scores, groups = torch.full((8,), 0.3), torch.zeros(8, dtype=torch.int64)
    counts = torch.arange(8) < 7
    rounded = scores[:7] - scores[:7].sum() / 7
    assert rounded.abs().max() > 0  # 3e-8, which divided by 0 + 1e-9 is an advantage of 30
    for valid_rows in (counts, None):
        assert group_advantages(scores, groups, valid=valid_rows, eps=1e-9).tolist() == [0.0] * 8
    assert group_advantages(scores * counts, groups, valid=counts, scale="none").tolist() == [0.0] * 8


def test_masked_row_does_not_count_in_its_group() -> None:
    scores, groups = torch.tensor([1.0, 3.0, torch.nan]), torch.zeros(3, dtype=torch.int64)
    counts = torch.tensor([True, True, False])
    close(group_advantages(scores, groups, valid=counts, scale="none"), [-1, 1, 0])
    nobody = group_advantages(scores, groups, valid=torch.zeros(3, dtype=torch.bool), single="score")
    assert nobody.tolist() == [0.0, 0.0, 0.0]


def test_no_rows() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    empty, mask = torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool)
    assert gae(empty, empty, mask, gamma=1.0, lam=1.0)[0].shape == (0, 4)
    assert whiten(empty, mask).shape == (0, 4)


def test_spread(case: str) -> None:
    mask = mask_of(case)
    advantages = torch.tensor([1.0, -2.0, 3.0, -4.0])
    expected = [[float(advantages[b]) if mask[b, t] else 0.0 for t in range(mask.shape[1])] for b in range(4)]
    close(spread(advantages, mask), expected)


def test_explained_variance() -> None:
    mask = torch.tensor([[True, True, True, False]])
    returns = torch.tensor([[1.0, 2.0, 3.0, torch.nan]])
    close(explained_variance(returns + 5, returns, mask), 1.0)  # a constant error does not count
    close(explained_variance(torch.zeros(1, 4), returns, mask), 0.0)
    close(explained_variance(-returns, returns, mask), -3.0)
    assert explained_variance(returns, torch.ones(1, 4), mask) == 0
