"""The loss of supervised fine-tuning: cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rlhf_lightning.functional.aggregate import Aggregation, Counts, Loss, aggregate, check_aggregation
from rlhf_lightning.functional.masked import token_mean, zero_masked


@dataclass(frozen=True, kw_only=True)
class SFTLoss(Loss):
    """Cross-entropy of the response tokens.

    Metrics: sft/loss, sft/nll (mean over tokens whatever the aggregation; its exponential is the perplexity),
    sft/probability (mean probability of the right token).
    """

    coef: float = 1.0
    """Weight of the loss, not below 0."""
    aggregation: Aggregation = "token-mean"
    """How tokens become one number."""
    horizon: int = 0
    """Constant length of `seq-mean-token-sum-norm`, tokens."""

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.horizon)
        if not float(self.coef) >= 0:
            raise ValueError(
                f"SFTLoss(coef={self.coef}): must not be below 0. Try 1.0, or 0.1 beside another loss."
            )

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of some rows; see `Loss`."""
        mask = rows["response_mask"]
        log_probs = zero_masked(outputs["log_probs"], mask)
        loss = self.coef * aggregate(-log_probs, mask, self.aggregation, counts, horizon=self.horizon)
        return loss, {
            "sft/loss": loss.detach(),
            "sft/nll": token_mean(-log_probs, mask, counts.tokens),
            "sft/probability": token_mean(log_probs.exp(), mask, counts.tokens),
        }
