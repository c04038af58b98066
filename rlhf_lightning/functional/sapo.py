"""SAPO: a soft gate in place of PPO's clip (Gao 2025, arXiv 2511.20347)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_lightning.functional.aggregate import Aggregation
from rlhf_lightning.functional.policy import PolicyLoss
from rlhf_lightning.functional.ratio import log_ratio


@dataclass(frozen=True, kw_only=True)
class SAPOLoss(PolicyLoss):
    """-(4 / tau) sigmoid(tau (e^r - 1)) A, SAPO eq. 5 and 6; tau is tau_pos where A > 0, else tau_neg.

    A token's gradient is that of the plain ratio at e^r = 1, and fades on both sides of it. There is nothing
    to clip: `clip_low`, `clip_high` and `dual_clip` stay as they are.
    """

    tau_pos: float = 1.0
    """How fast the gradient fades where the advantage is positive."""
    tau_neg: float = 1.05
    """The same where it is not: faster, since such tokens make a run unstable."""
    aggregation: Aggregation = "seq-mean-token-mean"
    """How tokens become one number."""

    def check_clip(self) -> None:
        """Refuse limits, which the surrogate does not have, and gates that do not fade."""
        if (self.clip_low, self.clip_high, self.dual_clip) != (0.2, 0.2, None):
            raise ValueError(
                f"SAPOLoss(clip_low={self.clip_low}, clip_high={self.clip_high}, "
                f"dual_clip={self.dual_clip}): its gate is soft, and nothing is clipped. Leave them out, or "
                "try PolicyLoss."
            )
        if min(self.tau_pos, self.tau_neg) <= 0:
            raise ValueError(
                f"SAPOLoss(tau_pos={self.tau_pos}, tau_neg={self.tau_neg}): must be above 0. "
                "Try 1.0 and 1.05."
            )

    def surrogate(self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The gated ratio."""
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg)
        # sigmoid(x) = (1 + tanh(x / 2)) / 2; torch's own rounds by a token's place in memory.
        gate = 2 / tau * (1 + torch.tanh(tau / 2 * (log_ratio(new, old).exp() - 1)))
        return -gate * advantages, torch.zeros_like(mask)
