"""The loss of process reward models: how likely each step of an answer is right, at its last token.

Legend: B rows, R response width. Lightman 2023, arXiv 2305.20050.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rlhf_lightning.functional.aggregate import Counts, Loss, aggregate
from rlhf_lightning.functional.masked import token_mean, zero_masked


@dataclass(frozen=True, kw_only=True)
class StepLoss(Loss):
    """Binary cross-entropy of the steps, mean over the labelled steps of the mini-batch.

    With v the number at a step's last token, its logit, and y its label:
    -y log sigma(v) - (1 - y) log sigma(-v).

    Metrics, all means over the labelled steps: process_reward/loss (what is minimised),
    process_reward/accuracy (steps on the right side of one half), process_reward/probability (that the label
    is given: y sigma(v) + (1 - y) sigma(-v)).
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """`step_labels` [n, R] in [0, 1]; `step_mask` [n, R] bool, True at a labelled step's last token."""
        return ("step_labels", "step_mask")

    def count(self, rows: Mapping[str, Tensor]) -> Counts:
        """Labelled steps as tokens, and rows that have one."""
        return Counts.of(_steps(rows))

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of some rows; see `Loss`."""
        steps = _steps(rows)
        logits, labels = zero_masked(outputs["values"], steps), zero_masked(rows["step_labels"], steps)
        each = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        loss = aggregate(each, steps, "token-mean", counts)
        right = torch.sigmoid(logits.detach())
        probability = labels * right + (1 - labels) * (1 - right)
        return loss, {
            "process_reward/loss": loss.detach(),
            "process_reward/accuracy": token_mean((right > 0.5) == (labels > 0.5), steps, counts.tokens),
            "process_reward/probability": token_mean(probability, steps, counts.tokens),
        }


def _steps(rows: Mapping[str, Tensor]) -> Tensor:
    return rows["step_mask"] & rows["response_mask"]
