"""GMPO: a geometric mean of token ratios, each clipped in log space (Zhao 2025, arXiv 2507.20673)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_lightning.functional.aggregate import Aggregation
from rlhf_lightning.functional.masked import masked_mean
from rlhf_lightning.functional.policy import PolicyLoss
from rlhf_lightning.functional.ratio import log_ratio


@dataclass(frozen=True, kw_only=True)
class GeometricPolicyLoss(PolicyLoss):
    """-A exp(mean over tokens of sign min(sign r, sign clip(r, -clip_low, clip_high))).

    The sign is that of A. A response has one advantage: the mean over its tokens.
    """

    clip_low: float = 0.4
    """How far the logarithm of a token's ratio may fall below 0."""
    clip_high: float = 0.4
    """How far it may rise above 0."""
    aggregation: Aggregation = "seq-mean-token-mean"
    """How responses, whose tokens all have the same loss, become one number."""

    def check_clip(self) -> None:
        """Refuse limits that the surrogate cannot have."""
        if self.clip_low < 0 or self.clip_high < 0:
            raise ValueError(
                f"GeometricPolicyLoss(clip_low={self.clip_low}, clip_high={self.clip_high}): the log-ratio "
                "is kept within [-clip_low, clip_high], so both must be at least 0. Try 0.4 and 0.4."
            )
        if self.dual_clip is not None:
            raise ValueError(
                f"GeometricPolicyLoss(dual_clip={self.dual_clip}): it has no dual clip. Leave it at None."
            )

    def surrogate(self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The same number for all tokens of a response."""
        r, sign = log_ratio(new, old), advantages.sign()
        clipped = r.clamp(-self.clip_low, self.clip_high)
        held = sign * torch.minimum(sign * r, sign * clipped)
        ratio = masked_mean(held, mask, dim=1).exp()
        loss = -masked_mean(advantages, mask, dim=1) * ratio
        return loss[:, None].expand(mask.shape), sign * clipped < sign * r
