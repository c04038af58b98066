"""Pairs of answers to one prompt in neighbouring rows: chosen, rejected, chosen, rejected, ...

Legend: B rows, R response width, P = B / 2 pairs; row 2i is the chosen answer of pair i, row 2i + 1 the
rejected. A pair counts where both rows have a valid token, and only then: `Counts` of a `PairLoss` are of
whole pairs alone, so that a mini-batch without one holds nothing to learn from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from rlhf_lightning.functional.aggregate import Counts, Loss, aggregate
from rlhf_lightning.functional.masked import masked_sum


class PairLoss(Loss):
    """A loss that compares the two answers of a pair.

    Its counts are of whole pairs: a term that sums over tokens or rows takes the mask `in_whole_pairs`.

    Example:
        >>> class Likelihood(PairLoss):
        ...     def __call__(self, outputs, rows, counts):
        ...         mask = in_whole_pairs(rows["response_mask"])
        ...         loss = aggregate(-outputs["log_probs"], mask, "token-mean", counts)
        ...         return loss, {"actor/loss": loss.detach()}
    """

    @property
    def rows_together(self) -> int:
        """A chosen and a rejected answer."""
        return 2

    def count(self, rows: Mapping[str, Tensor]) -> Counts:
        """Pairs, and rows and tokens of those."""
        return Counts.of(in_whole_pairs(rows["response_mask"]), together=2)


def split_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Take apart the chosen and the rejected rows: [B, ...] into twice [P, ...]."""
    return x[0::2], x[1::2]


def whole_pairs(mask: Tensor) -> Tensor:
    """Say which pairs count: [P] bool of a [B, R] bool mask."""
    return mask.any(dim=1).view(-1, 2).all(dim=1)


def in_whole_pairs(mask: Tensor) -> Tensor:
    """Leave out rows whose pair is not whole: [B, R] bool of a [B, R] bool mask."""
    return mask & whole_pairs(mask).repeat_interleave(2)[:, None]


def count_pairs(mask: Tensor) -> Counts:
    """Count pairs, and as tokens those of the chosen answers of whole pairs, which a likelihood term reads.

    Args:
        mask: [B, R] bool.
    """
    whole = in_whole_pairs(mask)
    return replace(Counts.of(whole, together=2), tokens=int(split_pairs(whole)[0].sum()))


def pair_mean(x: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Compute these rows' part of the mean over the whole pairs of the mini-batch.

    Args:
        x: [P], may hold anything where a pair does not count.
        mask: [B, R] bool.
        counts: of the whole mini-batch.
    """
    return masked_sum(x, whole_pairs(mask)) / max(counts.groups, 1)


def sft_term(
    log_probs: Tensor, mask: Tensor, counts: Counts, *, coef: float, prefix: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute these rows' part of the mean negative log-likelihood of the chosen tokens, as TRL has it.

    Args:
        log_probs: [B, R].
        mask: [B, R] bool.
        counts: of the whole mini-batch, by `count_pairs`.
        coef: weight of the term.
        prefix: beginning of the metric's name.

    Returns:
        What is added to the loss; sft_loss, the term without its weight. 0 and nothing where the weight is 0.
    """
    if not coef:
        return log_probs.new_zeros(()), {}
    chosen = split_pairs(in_whole_pairs(mask))[0]
    nll = aggregate(-split_pairs(log_probs)[0], chosen, "token-mean", counts)
    return coef * nll, {f"{prefix}sft_loss": nll.detach()}
