"""SimPO: the loss of a policy that learns from pairs without a reference, by mean log-probabilities.

Legend: P pairs (see `pairs`); r = mean over tokens of log_probs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlhf_lightning.functional.aggregate import Counts
from rlhf_lightning.functional.dpo import check_preference, preference_loss, preference_metrics
from rlhf_lightning.functional.masked import masked_mean, zero_masked
from rlhf_lightning.functional.pairs import PairLoss, count_pairs, pair_mean, sft_term, split_pairs


@dataclass(frozen=True, kw_only=True)
class SimPOLoss(PairLoss):
    """SimPO, Meng 2024, arXiv 2405.14734 eq. 6: -log sigma(beta (r(chosen) - r(rejected)) - gamma).

    With `length_average=False`, `gamma=0` and `sft_coef=1` it is CPO (Xu 2024, arXiv 2401.08417).

    Metrics: simpo/loss (what is minimised); as means over the pairs of the mini-batch simpo/accuracy (pairs
    whose chosen answer has the higher reward), simpo/chosen_reward and simpo/rejected_reward (beta r),
    simpo/margin (their difference, gamma left out) and simpo/chosen_log_prob (r); simpo/sft_loss (nats per
    token) if there is a likelihood term.
    """

    kind: Literal["sigmoid", "hinge"] = "sigmoid"
    """Logistic, or max(0, 1 - (beta (r(chosen) - r(rejected)) - gamma)), also in the authors' code."""
    beta: float = 2.0
    """Scale of the rewards."""
    gamma: float = 1.0
    """Margin in rewards that a chosen answer is to have."""
    label_smoothing: float = 0.0
    """Share of pairs whose labels are believed to be swapped."""
    length_average: bool = True
    """Take r as the mean over tokens; False: the sum, as CPO does."""
    sft_coef: float = 0.0
    """Weight of the chosen answers' negative log-likelihood (CPO), mean over their tokens."""

    def __post_init__(self) -> None:
        if self.kind not in ("sigmoid", "hinge"):
            raise ValueError(f"SimPOLoss(kind={self.kind!r}): unknown. Try 'sigmoid' or 'hinge'.")
        check_preference(self.kind, self.label_smoothing)
        if self.beta <= 0 or self.gamma < 0 or self.sft_coef < 0:
            raise ValueError(
                f"SimPOLoss(beta={self.beta}, gamma={self.gamma}, sft_coef={self.sft_coef}): beta must be "
                "above 0, the others not below. Try 2.0, 1.0 and 0.0."
            )

    def count(self, rows: Mapping[str, Tensor]) -> Counts:
        """Pairs, and tokens of chosen answers."""
        return count_pairs(rows["response_mask"])

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of some rows; see `Loss`."""
        mask = rows["response_mask"]
        log_probs = zero_masked(outputs["log_probs"], mask)
        r = masked_mean(log_probs, mask, dim=1) if self.length_average else log_probs.sum(dim=1)
        chosen, rejected = split_pairs(r)
        each = preference_loss(
            chosen - rejected - self.gamma / self.beta,
            kind=self.kind,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
        )
        loss = pair_mean(each, mask, counts)
        metrics = preference_metrics(self.beta * chosen, self.beta * rejected, mask, counts, prefix="simpo/")
        metrics["simpo/chosen_log_prob"] = pair_mean(chosen.detach(), mask, counts)
        sft, of_sft = sft_term(log_probs, mask, counts, coef=self.sft_coef, prefix="simpo/")
        loss = loss + sft
        return loss, metrics | of_sft | {"simpo/loss": loss.detach()}
