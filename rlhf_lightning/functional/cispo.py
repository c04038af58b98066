"""CISPO: the policy gradient with clipped importance weights (MiniMax 2025, arXiv 2506.13585)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_lightning.functional.policy import PolicyLoss
from rlhf_lightning.functional.ratio import log_ratio


@dataclass(frozen=True, kw_only=True)
class CISPOLoss(PolicyLoss):
    """-stopgrad(clip(e^r)) A log_prob, MiniMax-M1 eq. 4 and 5: a clipped token still has a gradient.

    `absolute_high` reads clip_high as TRL reads its epsilon_high; TRL has no lower limit: keep clip_low at 1.
    """

    clip_low: float = 1.0
    """How far the weight may fall below 1; 1 is no limit, as in the paper."""
    clip_high: float = 0.2
    """How far it may rise above 1 (verl), or its largest value, if `absolute_high`."""
    absolute_high: bool = False
    """`clip_high` is the largest weight itself, such as TRL's 5.0."""

    def check_clip(self) -> None:
        """Refuse limits that the surrogate cannot have.

        Raises:
            ValueError: a dual clip is given, or an absolute limit below 1.
        """
        super().check_clip()
        if self.dual_clip is not None:
            raise ValueError(f"CISPOLoss(dual_clip={self.dual_clip}): it has no dual clip. Leave it at None.")
        if self.absolute_high and self.clip_high < 1:
            raise ValueError(
                f"CISPOLoss(absolute_high=True, clip_high={self.clip_high}): that limits the weight of an "
                f"unchanged policy, which is 1. Try 5.0, or absolute_high=False."
            )

    def surrogate(self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The policy gradient, weighted."""
        ratio = log_ratio(new, old).exp().detach()
        weight = ratio.clamp(1 - self.clip_low, self.clip_high + (0 if self.absolute_high else 1))
        return -weight * advantages * new, weight != ratio
