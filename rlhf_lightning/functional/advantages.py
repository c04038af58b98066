"""Advantages: how much better than expected each token or each response was.

Legend: B rows, R response width; everything is [B, R] float32 unless said otherwise, 0 where `mask` (bool) is
False. Inputs may hold anything there.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_last_valid, last_valid, masked_mean, masked_var, zero_masked

Gap = Literal["carry", "zero"]
Scale = Literal["std", "none"]
Single = Literal["zero", "score"]


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float, gap: Gap = "carry"
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, Schulman 2016 eq. 16.

    delta_t = r_t + gamma V' - V_t and A_t = delta_t + gamma lam A', the primes at the next token. After the
    last valid token both are 0; `bootstrap_truncated` says otherwise for responses without an end.

    Args:
        rewards: [B, R] token-level rewards; what stands at a masked position is not counted.
        values: [B, R] value of the state before each token.
        mask: [B, R] bool.
        gamma: discount per token.
        lam: weight of longer estimates; 0 is one-step, 1 is Monte Carlo.
        gap: at a masked position inside a response, `carry` V' and A' over it (verl, NeMo-RL, AReaL) or put
            `zero` there and keep discounting (OpenRLHF).

    Returns:
        advantages [B, R] and returns [B, R], the latter advantages + values before any whitening.
    """
    rewards, values = zero_masked(rewards, mask), zero_masked(values, mask)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        counts = mask[:, t] if gap == "carry" else torch.ones_like(mask[:, t])
        next_value = torch.where(counts, values[:, t], next_value)
        next_advantage = torch.where(counts, advantage, next_advantage)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    return advantages, advantages + values


def bootstrap_truncated(
    rewards: Tensor, values: Tensor, mask: Tensor, *, truncated: Tensor, gamma: float
) -> Tensor:
    """Add gamma V_last to the last reward of responses that were cut before an end token (ReaLHF, AReaL).

    In `gae` this is the same as starting from V' = V_last instead of 0; V_last is the value at the last valid
    token.

    Args:
        rewards: [B, R].
        values: [B, R].
        mask: [B, R] bool.
        truncated: [B] bool, True for a response without an end token.
        gamma: discount per token.

    Returns:
        [B, R], to be handed to `gae` as its rewards.
    """
    tail = zero_masked(last_valid(values, mask), truncated)
    return zero_masked(rewards, mask) + gamma * at_last_valid(tail, mask)


def whiten(x: Tensor, mask: Tensor, *, unbiased: bool = True, eps: float = 1e-8) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over all valid tokens: (x - mean) / sqrt(var + eps).

    Give it the whole rollout batch: whitening each rank's share alone (TRL) lets the placement change
    the result.

    Args:
        x: [B, R].
        mask: [B, R] bool.
        unbiased: divide by n - 1 (verl, NeMo-RL) or, if False, by n (OpenRLHF, AReaL).
        eps: added to the variance.

    Returns:
        [B, R]; all 0 if there is one valid token or none.
    """
    scale = torch.rsqrt(masked_var(x, mask, unbiased=unbiased) + eps)
    return zero_masked((zero_masked(x, mask) - masked_mean(x, mask)) * scale, mask)


def group_advantages(
    scores: Tensor,
    groups: Tensor,
    *,
    valid: Tensor | None = None,
    scale: Scale = "std",
    eps: float = 1e-6,
    single: Single = "zero",
) -> Tensor:
    """Compare each response with the other responses to the same prompt: (R - mean_g) / (std_g + eps).

    GRPO, DeepSeekMath section 4.1, the standard deviation unbiased; `scale="none"` is Dr.GRPO's R - mean_g. A
    group whose scores are all equal gives 0.

    Args:
        scores: [B] one outcome per response.
        groups: [B] int64, equal for the responses to one prompt, in any order.
        valid: [B] bool, False for a row that must not count (fully masked): its advantage is 0. None: all do.
        scale: divide by the group's standard deviation (`std`) or not (`none`).
        eps: added to the standard deviation; 1e-6 as in verl (TRL 1e-4, OpenRLHF 1e-9).
        single: a group of one gives `zero` (NeMo-RL) or its `score` over 1 + eps (verl: mean 0, std 1).

    Returns:
        [B] float32.
    """
    valid = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid
    scores = zero_masked(scores, valid)
    index = torch.unique(groups, return_inverse=True)[1]
    totals = scores.new_zeros(len(scores))
    count = totals.index_add(0, index, valid.to(scores.dtype))
    mean = totals.index_add(0, index, scores) / count.clamp(min=1)
    deviation = zero_masked(scores - mean[index], valid & _varied(scores, index, valid))
    variance = totals.index_add(0, index, deviation.square()) / (count - 1).clamp(min=1)
    alone = (count == 1)[index]
    if scale == "std":
        deviation = deviation / (variance.sqrt()[index] + eps)
    lone = scores / (1 + eps) if scale == "std" else scores
    return torch.where(alone, lone if single == "score" else torch.zeros_like(scores), deviation)


def _varied(scores: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """Mark the rows of groups with two different scores: exact, where a mean is rounded."""
    inf = torch.full_like(scores, torch.inf)
    low = inf.scatter_reduce(0, index, torch.where(valid, scores, inf), "amin")
    high = (-inf).scatter_reduce(0, index, torch.where(valid, scores, -inf), "amax")
    return (low < high)[index]


def spread(advantages: Tensor, mask: Tensor) -> Tensor:
    """Give every valid token of a response the response's advantage.

    Args:
        advantages: [B].
        mask: [B, R] bool.

    Returns:
        [B, R].
    """
    return zero_masked(advantages[:, None].expand(mask.shape), mask)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the variance of the returns that the values predict: 1 - var(returns - values) / var(returns).

    Args:
        values: [B, R].
        returns: [B, R].
        mask: [B, R] bool.

    Returns:
        A scalar: 1 is perfect, 0 is as good as a constant, negative is worse; 0 if the returns do not vary.
    """
    spread_of_returns = masked_var(returns, mask)
    residual = masked_var(zero_masked(returns, mask) - zero_masked(values, mask), mask)
    return torch.where(spread_of_returns > 0, 1 - residual / spread_of_returns, torch.zeros_like(residual))
