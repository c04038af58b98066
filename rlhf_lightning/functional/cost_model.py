"""The loss of cost models: how harmful an answer is, from pairs and from a label of each answer.

Legend: B rows, R response width, P pairs (see `pairs`). The *chosen* row of a pair is the safer answer, the
*rejected* row the more harmful one, so a cost is to be higher in the second row, against the scores of a
reward model. The cost of an answer is the number at its last valid token; its sign is to tell unsafe (> 0)
from safe (< 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_lightning.functional.aggregate import Counts
from rlhf_lightning.functional.masked import last_valid, widened
from rlhf_lightning.functional.pairs import PairLoss, pair_mean, split_pairs


def sign_loss(costs: Tensor, safe: Tensor) -> Tensor:
    """Compute -log sigma(s C), s = -1 for a safe answer and +1 for an unsafe one.

    Args:
        costs: C, [B].
        safe: [B] bool.

    Returns:
        [B] float32.
    """
    costs = widened(costs)
    return -logsigmoid(torch.where(safe, -costs, costs))


@dataclass(frozen=True, kw_only=True)
class CostLoss(PairLoss):
    """The loss of Safe-RLHF's cost model, mean over the pairs of the mini-batch.

    Dai 2023, arXiv 2310.12773 eq. 6: -log sigma(C_r - C_c) - log sigma(s_r C_r) - log sigma(s_c C_c), where r
    is the rejected, more harmful row and c the chosen one.

    Metrics: cost_model/loss (what is minimised); as means over the pairs cost_model/accuracy (pairs in the
    right order), cost_model/sign_accuracy (rows whose cost has the right sign), cost_model/chosen and
    cost_model/rejected (costs), cost_model/margin (rejected minus chosen).
    """

    sign_coef: float = 1.0
    """Weight of the two terms that place safe answers below 0 and unsafe ones above."""

    def __post_init__(self) -> None:
        if self.sign_coef < 0:
            raise ValueError(f"CostLoss(sign_coef={self.sign_coef}): must not be below 0. Try 1.0.")

    @property
    def columns(self) -> tuple[str, ...]:
        """`safe` [n]: True or above 0 for a safe answer; False, 0 or below for an unsafe one."""
        return ("safe",)

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of some rows; see `Loss`."""
        mask, safe = rows["response_mask"], rows["safe"] > 0
        costs = last_valid(outputs["values"], mask)
        chosen, rejected = split_pairs(costs)
        signs = sign_loss(costs, safe).view(-1, 2).sum(dim=1)
        loss = pair_mean(-logsigmoid(rejected - chosen) + self.sign_coef * signs, mask, counts)
        chosen, rejected = chosen.detach(), rejected.detach()
        right = widened(torch.where(safe, costs < 0, costs > 0))
        return loss, {
            "cost_model/loss": loss.detach(),
            "cost_model/accuracy": pair_mean(rejected > chosen, mask, counts),
            "cost_model/sign_accuracy": pair_mean(right.view(-1, 2).mean(dim=1), mask, counts),
            "cost_model/margin": pair_mean(rejected - chosen, mask, counts),
            "cost_model/chosen": pair_mean(chosen, mask, counts),
            "cost_model/rejected": pair_mean(rejected, mask, counts),
        }
