"""The base class of estimators of advantages: sums by row, and the divergence from the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_lightning.field_types import check_types
from rlhf_lightning.functional.estimator import Estimator
from rlhf_lightning.functional.kl import KLKind, kl_columns, kl_estimate
from rlhf_lightning.functional.rollout import row_totals


@dataclass(frozen=True, kw_only=True)
class PenalizedEstimator(Estimator):
    """Advantages from scores and a KL penalty.

    Reads response_mask and scores, and where it measures the divergence log_probs and ref_log_probs. Makes
    `advantages` [B, R] float32, what `row_totals` has, and with the divergence `kl` [B, R] and `row_kl` [B].
    """

    kl_coef: float = 0.0
    """Weight of the KL penalty in the reward; with 0 most estimators do not read the reference."""
    kl_estimator: KLKind = "k1"
    """Which estimate of the divergence, as in `kl_estimate`."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.kl_coef < 0:
            raise ValueError(
                f"{type(self).__name__}(kl_coef={self.kl_coef}): a penalty is not negative. "
                "Try 0.05, or 0 for none."
            )

    @property
    def measures_kl(self) -> bool:
        """Whether it reads the reference."""
        return self.kl_coef != 0

    @property
    def columns(self) -> tuple[str, ...]:
        """Mask and scores; log-probabilities for the divergence."""
        return ("response_mask", "scores", *(("log_probs", "ref_log_probs") if self.measures_kl else ()))

    @property
    def returns(self) -> tuple[str, ...]:
        """Advantages and sums by row; the divergence."""
        made = ("advantages", "row_scores", "row_tokens", "row_ends")
        return (*made, *(("kl", "row_kl") if self.measures_kl else ()))

    def common_columns(self, rows: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Compute what all subclasses have in common; each adds the advantages.

        Returns:
            The columns that it makes, all but the advantages; the divergence [B, R] float32, 0 where it is
            not measured.
        """
        mask = rows["response_mask"]
        found = row_totals(rows["scores"], mask)
        if not self.measures_kl:
            return found, torch.zeros_like(mask, dtype=torch.float32)
        kl = kl_estimate(rows["log_probs"], rows["ref_log_probs"], self.kl_estimator, mask=mask)
        return found | kl_columns(kl, mask), kl
