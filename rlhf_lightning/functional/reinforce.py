"""REINFORCE: the plain policy gradient, for answers that the policy itself has just drawn (Williams 1992)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_lightning.functional.policy import PolicyLoss


@dataclass(frozen=True, kw_only=True)
class ReinforceLoss(PolicyLoss):
    """-A log_prob, a mean over tokens and without a ratio: ReMax as its authors' code has it.

    It has nothing to clip: `clip_low`, `clip_high` and `dual_clip` stay as they are.
    """

    def check_clip(self) -> None:
        """Refuse limits, which the surrogate does not have."""
        if (self.clip_low, self.clip_high, self.dual_clip) != (0.2, 0.2, None):
            raise ValueError(
                f"ReinforceLoss(clip_low={self.clip_low}, clip_high={self.clip_high}, "
                f"dual_clip={self.dual_clip}): it has no ratio to clip. Leave them out, or try PolicyLoss."
            )

    def surrogate(self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The policy gradient."""
        return -advantages * new, torch.zeros_like(mask)
