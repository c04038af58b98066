"""Importance weights for tokens that were drawn from another policy than the training engine's.

A generation engine rounds differently from the training engine, or has older weights. `log_probs` are the
training engine's at the start of the iteration, `rollout_log_probs` those with which the tokens were drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf_lightning.functional.masked import masked_sum, token_mean, zero_masked
from rlhf_lightning.functional.ratio import MAX_LOG_RATIO, log_ratio

Level = Literal["token", "sequence"]
Mode = Literal["truncate", "mask"]


@dataclass(frozen=True, kw_only=True)
class OffPolicyCorrection:
    """Importance weights from the rollout's policy to the one that training began the iteration with.

    `truncate` is TIS (Yao 2025, "Your efficient RL framework secretly brings you off-policy RL training"),
    `mask` is IcePop (Ling Team 2025, arXiv 2510.18855).

    Metrics, means over the tokens of the mini-batch: actor/mismatch_ratio (the weight before it is limited)
    and actor/correction_weight (after).
    """

    level: Level = "token"
    """A weight for each token, or one for each response: the product of its tokens' ratios."""
    mode: Mode = "truncate"
    """Beyond the limits `truncate` keeps the limit, `mask` gives 0."""
    low: float = 0.0
    """Smallest weight."""
    high: float = 2.0
    """Largest weight."""

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence"):
            raise ValueError(
                f"OffPolicyCorrection(level={self.level!r}): unknown. Try 'token' or 'sequence'."
            )
        if self.mode not in ("truncate", "mask"):
            raise ValueError(f"OffPolicyCorrection(mode={self.mode!r}): unknown. Try 'truncate' or 'mask'.")
        if not 0 <= self.low <= self.high or self.high == 0:
            raise ValueError(
                f"OffPolicyCorrection(low={self.low}, high={self.high}): weights lie within [low, high], so "
                "0 <= low <= high and high > 0. Try 0.0 and 2.0, or 0.5 and 5.0 with mode='mask'."
            )

    def ratios(self, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
        """Ratios of the training engine's to the rollout's probabilities: weights before they are limited.

        Args:
            old_log_probs: [B, R] of the training engine at the start of the iteration.
            rollout_log_probs: [B, R] with which the tokens were drawn.
            mask: [B, R] bool.

        Returns:
            [B, R] float32, without a gradient; exponents are limited to +-20.
        """
        d = log_ratio(zero_masked(old_log_probs, mask), zero_masked(rollout_log_probs, mask)).detach()
        if self.level == "sequence":
            d = masked_sum(d, mask, dim=1)[:, None].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expand(mask.shape)
        return d.exp()

    def weights(self, ratios: Tensor) -> Tensor:
        """The ratios [B, R] within [low, high], by `mode`."""
        held = ratios.clamp(self.low, self.high)
        return held if self.mode == "truncate" else torch.where(held == ratios, ratios, 0.0)

    def __call__(
        self, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, num_tokens: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Weigh the tokens of some rows by their `ratios`; the whole mini-batch has `num_tokens` valid ones.

        Returns:
            Weights [B, R] float32 without a gradient, and the metrics, as parts of those of the mini-batch.
        """
        ratios = self.ratios(old_log_probs, rollout_log_probs, mask)
        weights = self.weights(ratios)
        return weights, {
            "actor/mismatch_ratio": token_mean(ratios, mask, num_tokens),
            "actor/correction_weight": token_mean(weights, mask, num_tokens),
        }
