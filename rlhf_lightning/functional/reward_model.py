"""The loss of reward models, from pairs: the better answer is to have the higher score.

Legend: B rows, R response width, P pairs (see `pairs`). The score of an answer is the number at its last
valid token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_lightning.functional.aggregate import Counts
from rlhf_lightning.functional.masked import last_valid, widened, zero_masked
from rlhf_lightning.functional.pairs import PairLoss, pair_mean, split_pairs, whole_pairs


def pairwise_loss(
    chosen: Tensor, rejected: Tensor, margins: Tensor | None = None, *, centering: float = 0.0
) -> Tensor:
    """Bradley and Terry's loss: -log sigma(c - r - m) + centering (c + r)^2.

    Ouyang 2022 eq. 1; the margin from Llama 2, Touvron 2023 eq. 2; the second term, which keeps the scores
    around 0, from Eisenstein 2023, arXiv 2312.09244 eq. 2.

    Args:
        chosen: c, [P].
        rejected: r, [P].
        margins: m, [P]; None is 0.
        centering: weight of the second term.

    Returns:
        [P] float32.
    """
    chosen, rejected = widened(chosen), widened(rejected)
    apart = chosen - rejected if margins is None else chosen - rejected - widened(margins)
    loss = -logsigmoid(apart)
    return loss + centering * (chosen + rejected).square() if centering else loss


@dataclass(frozen=True, kw_only=True)
class PairwiseLoss(PairLoss):
    """The loss of a reward model, mean over the pairs of the mini-batch.

    Metrics: reward_model/loss (what is minimised); as means over the pairs reward_model/accuracy (pairs in
    the right order), reward_model/chosen and reward_model/rejected (scores), reward_model/margin (their
    difference).
    """

    centering: float = 0.0
    """Weight of the squared sum of a pair's scores, which keeps them around 0; 0.01 is usual."""
    margin: bool = False
    """Read the column `margins`: by how much each chosen answer is better."""

    def __post_init__(self) -> None:
        if self.centering < 0:
            raise ValueError(
                f"PairwiseLoss(centering={self.centering}): must not be below 0. Try 0.01, or 0.0 for none."
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """If asked for `margins` [n], of which the chosen row of a pair is read."""
        return ("margins",) if self.margin else ()

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of some rows; see `Loss`."""
        mask = rows["response_mask"]
        chosen, rejected = split_pairs(last_valid(outputs["values"], mask))
        margins = zero_masked(split_pairs(rows["margins"])[0], whole_pairs(mask)) if self.margin else None
        each = pairwise_loss(chosen, rejected, margins, centering=self.centering)
        loss = pair_mean(each, mask, counts)
        chosen, rejected = chosen.detach(), rejected.detach()
        return loss, {
            "reward_model/loss": loss.detach(),
            "reward_model/accuracy": pair_mean(chosen > rejected, mask, counts),
            "reward_model/margin": pair_mean(chosen - rejected, mask, counts),
            "reward_model/chosen": pair_mean(chosen, mask, counts),
            "reward_model/rejected": pair_mean(rejected, mask, counts),
        }
