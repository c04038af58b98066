"""Generalized advantage estimation: how much better than a critic expected each token was.

Legend: B rows, R response width; everything is [B, R] float32 unless said otherwise, 0 where `mask` (bool) is
False. Inputs may hold anything there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_last_valid, by_position, last_valid, zero_masked
from rlhf_lightning.functional.moments import NOISE

Gap = Literal["carry", "zero"]


def check_discounts(owner: str, **discounts: float | Tensor) -> None:
    """Refuse a discount such as gamma or lambda, by its option's name, outside [0, 1].

    Raises:
        ValueError: one is outside, or is a tensor of several numbers.
    """
    for name, value in discounts.items():
        if isinstance(value, Tensor) and value.dim():
            raise ValueError(
                f"{owner}({name}=tensor {list(value.shape)}): one number for all rows. `gae` of "
                "rlhf_lightning.functional takes a lam for each."
            )
        if not 0 <= value <= 1:
            raise ValueError(f"{owner}({name}={value}): must lie within [0, 1]. Try {name}=1.0.")


def _check_lam(lam: float | Tensor, *, rows: int) -> None:
    if not isinstance(lam, Tensor):
        check_discounts("gae", lam=lam)
        return
    if lam.shape not in ((), (rows,)):
        raise ValueError(f"gae(lam=tensor {list(lam.shape)}): takes one number for each of the {rows} rows.")
    if not bool(((lam >= 0) & (lam <= 1)).all()):
        lowest, highest = float(lam.min()), float(lam.max())
        raise ValueError(
            f"gae(lam=tensor from {lowest:.3g} to {highest:.3g}): must lie within [0, 1]. Try "
            "lam.clamp(0, 1)."
        )


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor, gap: Gap = "carry"
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, Schulman 2016 eq. 16.

    delta_t = r_t + gamma V' - V_t and A_t = delta_t + gamma lam A', the primes at the next token. After the
    last valid token both are 0; `bootstrap_truncated` says otherwise for responses without an end.

    Args:
        rewards: [B, R] token-level rewards; what stands at a masked position is not counted.
        values: [B, R] value of the state before each token.
        mask: [B, R] bool.
        gamma: discount per token.
        lam: weight of longer estimates; 0 is one-step, 1 is Monte Carlo. [B], where each row has its own, as
            the length-adaptive one of VAPO (Yue 2025).
        gap: at a masked position inside a response, `carry` V' and A' over it (verl, NeMo-RL, AReaL) or put
            `zero` there and keep discounting (OpenRLHF).

    Returns:
        advantages [B, R] and returns [B, R], the latter advantages + values before any whitening.

    Raises:
        ValueError: `gap` is neither `carry` nor `zero`, or `lam` not one number within [0, 1] for each row.
    """
    if gap not in get_args(Gap):
        raise ValueError(f"gae(gap={gap!r}): unknown. Try 'carry' or 'zero'.")
    _check_lam(lam, rows=len(mask))
    rewards, values = zero_masked(rewards, mask), zero_masked(values, mask)
    reward_at, value_at, valid_at = by_position(rewards), by_position(values), by_position(mask)
    advantage_at = torch.zeros_like(value_at)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = reward_at[t] + gamma * next_value - value_at[t]
        advantage = delta + gamma * lam * next_advantage
        counts = valid_at[t] if gap == "carry" else torch.ones_like(valid_at[t])
        next_value = torch.where(counts, value_at[t], next_value)
        next_advantage = torch.where(counts, advantage, next_advantage)
        advantage_at[t] = torch.where(valid_at[t], advantage, 0.0)
    advantages = by_position(advantage_at)
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


def explained_variance(rows: Mapping[str, Tensor]) -> float:
    """Share of the variance of the returns that the values predict: 1 - var(returns - values) / var(returns).

    Args:
        rows: the sums by row that `GAEEstimator` makes, [B] each.

    Returns:
        1 is perfect, 0 is as good as a constant, negative is worse; 0 if the returns do not vary.
    """
    count = int(rows["row_tokens"].sum())
    if not count:
        return 0.0
    spread, size = _variance(rows["row_returns"], rows["row_squares"], count)
    residual, _ = _variance(rows["row_errors"], rows["row_error_squares"], count)
    return 1 - residual / spread if spread > NOISE * size else 0.0


def _variance(totals: Tensor, squares: Tensor, count: int) -> tuple[float, float]:
    """The variance of `count` numbers with these sums by row, and their mean square, to compare it with."""
    mean, size = float(totals.double().sum()) / count, float(squares.double().sum()) / count
    return size - mean * mean, size
