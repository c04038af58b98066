"""The estimator of GRPO, RLOO and OPO: advantages against the other answers to the same prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlhf_lightning.functional.estimator import Add, alone
from rlhf_lightning.functional.groups import (
    Scale,
    Single,
    group_advantages,
    group_std,
    leave_one_out,
    neighbour_groups,
    optimal_baseline,
    per_std,
    spread,
)
from rlhf_lightning.functional.masked import masked_sum
from rlhf_lightning.functional.overlong import Overlong
from rlhf_lightning.functional.penalized_estimator import PenalizedEstimator

Baseline = Literal["mean", "leave_one_out", "length_weighted"]


@dataclass(frozen=True, kw_only=True)
class GroupEstimator(PenalizedEstimator):
    """One advantage for a response: its outcome less a baseline from its group, the neighbouring rows.

    The columns are those of `PenalizedEstimator`; the penalty is summed over tokens into the outcome, as in
    TRL's RLOO.
    """

    group_size: int
    """Answers to each prompt."""
    baseline: Baseline = "mean"
    """The group's `mean` (GRPO), the mean of the others (`leave_one_out`, RLOO), or `length_weighted`
    (OPO)."""
    scale: Scale = "std"
    """Divide by the group's standard deviation (GRPO), or by `none` (Dr.GRPO, RLOO, OPO)."""
    eps: float = 1e-6
    """Added to the standard deviation: 1e-6 in verl, 1e-4 in TRL, 1e-9 in OpenRLHF."""
    single: Single = "zero"
    """Advantage of a group of one: `zero` (NeMo-RL) or its `score` (verl)."""
    overlong: Overlong | None = None
    """Penalty for responses near the length limit, added to their outcome; None is none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 1:
            raise ValueError(f"GroupEstimator(group_size={self.group_size}): must be at least 1. Try 8.")
        if self.eps < 0:
            raise ValueError(f"GroupEstimator(eps={self.eps}): must not be negative. Try 1e-6.")

    @property
    def rows_together(self) -> int:
        """A whole group."""
        return self.group_size

    def __call__(self, rows: Mapping[str, Tensor], add: Add = alone) -> dict[str, Tensor]:
        """Compute the new columns; see `Estimator`."""
        mask = rows["response_mask"]
        found, kl = self.common_columns(rows)
        outcomes = found["row_scores"]
        if self.overlong is not None:
            outcomes = outcomes + self.overlong.penalty(found["row_ends"], max_tokens=mask.shape[1])
        outcomes = outcomes - self.kl_coef * masked_sum(kl, mask, dim=1)
        return found | {"advantages": spread(self._advantages(outcomes, mask), mask)}

    def _advantages(self, outcomes: Tensor, mask: Tensor) -> Tensor:
        groups = neighbour_groups(outcomes, self.group_size)
        valid, single = mask.any(dim=1), self.single
        if self.baseline == "mean":
            return group_advantages(
                outcomes, groups, valid=valid, scale=self.scale, eps=self.eps, single=single
            )
        if self.baseline == "leave_one_out":
            advantages = leave_one_out(outcomes, groups, valid=valid, single=single)
        else:
            advantages = optimal_baseline(outcomes, mask.sum(dim=1), groups, valid=valid, single=single)
        if self.scale == "none":
            return advantages
        return per_std(advantages, group_std(outcomes, groups, valid=valid), self.eps)
