"""The estimator of REINFORCE++: whitened returns without a critic (Hu 2025, arXiv 2501.03262)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlhf_lightning.functional.estimator import Add, alone
from rlhf_lightning.functional.gae import check_discounts
from rlhf_lightning.functional.groups import Single, group_advantages, neighbour_groups, spread
from rlhf_lightning.functional.kl import penalized_rewards
from rlhf_lightning.functional.masked import at_last_valid, masked_sum, zero_masked
from rlhf_lightning.functional.penalized_estimator import PenalizedEstimator
from rlhf_lightning.functional.returns import ReturnGap, discounted_returns
from rlhf_lightning.functional.whiten import whiten


@dataclass(frozen=True, kw_only=True)
class ReturnEstimator(PenalizedEstimator):
    """The discounted reward to go of r_t = score_t - beta kl_t, whitened over the whole batch; section 3.

    With a `group_size` above 1 it is the baseline variant: each outcome has its group's mean taken off first.
    The columns are those of `PenalizedEstimator`.
    """

    gamma: float = 1.0
    """Discount per token."""
    gap: ReturnGap = "carry"
    """A masked position inside a response is nothing (`carry`), a step worth `zero` (OpenRLHF), or an end:
    `forget` what follows (verl before 0.9)."""
    whiten: bool = True
    """Give the advantages of the whole batch mean 0 and variance 1."""
    unbiased: bool = True
    """Divide that variance by n - 1 (verl) or, if False, by n (OpenRLHF)."""
    group_size: int = 1
    """Answers to each prompt, neighbouring rows; above 1 their mean is the baseline."""
    single: Single = "zero"
    """Outcome of an answer without others to compare it with: `zero`, or its own `score` (verl)."""
    credit: Literal["to_go", "outcome"] = "to_go"
    """Give a token the rewards from it on, or the response's whole sum (verl's baseline variant)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_discounts("ReturnEstimator", gamma=self.gamma)
        if self.group_size < 1:
            raise ValueError(
                f"ReturnEstimator(group_size={self.group_size}): must be at least 1. Try 8, or 1."
            )
        if self.credit == "outcome" and self.gamma != 1:
            raise ValueError(
                f"ReturnEstimator(credit='outcome', gamma={self.gamma}): a response's sum has no discount. "
                "Try gamma=1.0, or credit='to_go'."
            )

    @property
    def rows_together(self) -> int:
        """A whole group."""
        return self.group_size

    def __call__(self, rows: Mapping[str, Tensor], add: Add = alone) -> dict[str, Tensor]:
        """Compute the new columns; see `Estimator`."""
        mask = rows["response_mask"]
        found, kl = self.common_columns(rows)
        advantages = self._credited(rows["scores"], kl, mask)
        if self.whiten:
            advantages = whiten(advantages, mask, unbiased=self.unbiased, add=add)
        return found | {"advantages": advantages}

    def _credited(self, scores: Tensor, kl: Tensor, mask: Tensor) -> Tensor:
        if self.credit == "outcome":
            penalized = penalized_rewards(scores, kl, mask, coef=self.kl_coef)
            return spread(self._compared(masked_sum(penalized, mask, dim=1), mask), mask)
        outcomes = masked_sum(scores, mask, dim=1)
        compared = zero_masked(scores, mask) + at_last_valid(self._compared(outcomes, mask) - outcomes, mask)
        rewards = penalized_rewards(compared, kl, mask, coef=self.kl_coef)
        return discounted_returns(rewards, mask, gamma=self.gamma, gap=self.gap)

    def _compared(self, outcomes: Tensor, mask: Tensor) -> Tensor:
        """Outcomes less their group's mean."""
        if self.group_size == 1:
            return outcomes
        groups = neighbour_groups(outcomes, self.group_size)
        valid = mask.any(dim=1)
        return group_advantages(outcomes, groups, valid=valid, scale="none", single=self.single)
