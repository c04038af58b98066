"""Estimates of the KL divergence from sampled tokens, the penalty in the reward, and its adaptive weight.

Legend: B rows, R response width; d = log_probs - ref_log_probs (natural logarithms). The tokens must have
been drawn from the policy of `log_probs` for the estimates to be unbiased (Schulman 2020, "Approximating KL
divergence").
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import masked_mean, zero_masked
from rlhf_lightning.functional.ratio import MAX_LOG_RATIO

KLKind = Literal["k1", "k2", "k3", "k1+", "k3+"]
_MAX_K3 = 10.0
"""Largest k3 of a token (verl)."""
_MAX_ERROR = 0.2
"""Largest relative distance from the target that counts (Ziegler 2019, section 2.2)."""


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, kind: KLKind = "k1", *, mask: Tensor | None = None
) -> Tensor:
    """Estimate the divergence token by token.

    `k1` = d, `k2` = d^2 / 2, `k3` = exp(-d) - 1 + d. `k1+` and `k3+` have the value of k1 and k3 and the
    gradient of k2, which is the unbiased gradient of the divergence (verl). In k3 d is limited to +-20 and
    the value to +-10 (verl), so that one odd token cannot overflow.

    Args:
        log_probs: [B, R] of the policy that drew the tokens.
        ref_log_probs: [B, R] of the reference.
        kind: which estimate.
        mask: [B, R] bool; the result is 0, and has no gradient, where it is False. None: every entry counts.

    Returns:
        [B, R] float32.

    Raises:
        ValueError: the kind is unknown.
    """
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    d = zero_masked(log_probs, mask) - zero_masked(ref_log_probs, mask)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "k3":
        return _k3(d)
    if kind not in ("k1+", "k3+"):
        raise ValueError(f"kl_estimate(kind={kind!r}): unknown. Try 'k1', 'k2', 'k3', 'k1+' or 'k3+'.")
    value = d if kind == "k1+" else _k3(d)
    gradient = 0.5 * d.square()
    return value.detach() + (gradient - gradient.detach())  # the difference is exactly 0


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(-d) + d).clamp(-_MAX_K3, _MAX_K3)


def penalized_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """Put the KL penalty into the reward: r_t = score_t - coef * kl_t (Ziegler 2019 eq. 2, token by token).

    Args:
        scores: [B, R] token-level scores, an outcome at the last valid token.
        kl: [B, R] of `kl_estimate`.
        mask: [B, R] bool.
        coef: weight of the penalty, beta.

    Returns:
        [B, R] float32, 0 where the mask is False.
    """
    return zero_masked(scores, mask) - coef * zero_masked(kl, mask)


def kl_columns(kl: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """`kl` [B, R] and its mean over each response's valid tokens, `row_kl` [B], as columns of a batch."""
    return {"kl": kl, "row_kl": masked_mean(kl, mask, dim=1)}


def adapted_kl_coef(coef: float, *, current: float, target: float, horizon: float, num_rows: int) -> float:
    """Steer the KL coefficient: coef * (1 + clip(current / target - 1, +-0.2) * num_rows / horizon).

    Ziegler 2019, section 2.2.

    Args:
        coef: the coefficient of this iteration.
        current: mean over this iteration's responses of each one's mean over tokens, nats.
        target: the divergence to hold, nats, above 0.
        horizon: rows over which a constant error of 20% multiplies the coefficient by about e^0.2, above 0.
        num_rows: responses in this iteration.

    Returns:
        The coefficient of the next iteration.

    Raises:
        ValueError: target or horizon is not above 0, or the rows are so many that it could turn negative.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(
            f"adapted_kl_coef(target={target}, horizon={horizon}): both must be above 0. "
            "Try target=0.1 nats per token, horizon=10000, or a fixed coefficient."
        )
    if _MAX_ERROR * num_rows >= horizon:
        raise ValueError(
            f"adapted_kl_coef(horizon={horizon}, num_rows={num_rows}): one iteration with little divergence "
            f"would take the whole coefficient away, or more. Try a horizon of at least {num_rows}, at which "
            "it changes by 20% an iteration at most."
        )
    error = min(max(current / target - 1, -_MAX_ERROR), _MAX_ERROR)
    return coef * (1 + error * num_rows / horizon)
