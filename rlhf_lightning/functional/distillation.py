"""The loss of distillation: a divergence between what a teacher and a student would say in each place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, log1p

import torch
from torch import Tensor

from rlhf_lightning.functional.aggregate import Aggregation, Counts, Loss, aggregate, check_aggregation
from rlhf_lightning.functional.masked import token_mean

_LEAST_REST = 1e-6
"""Least probability of the words that are no candidates: below it float32 sums are noise."""


@dataclass(frozen=True, kw_only=True)
class DistillationLoss(Loss):
    """The generalised Jensen-Shannon divergence (Agarwal 2023, GKD, arXiv 2306.13649, section 2).

    JSD = beta KL(teacher, m) + (1 - beta) KL(student, m) with m = beta teacher + (1 - beta) student; beta 0
    is KL(teacher, student) and beta 1 KL(student, teacher), as in TRL. The k words that the teacher finds
    likeliest are told apart, and all others count as one: at most the divergence of the whole
    distributions, and equal to it where the candidates are all words.

    Metrics: distillation/loss, distillation/forward_kl, distillation/reverse_kl (means over tokens whatever
    the aggregation), distillation/rest (the teacher's probability of words that are no candidates).

    Raises:
        ValueError: a value is outside its range.
    """

    beta: float = 0.5
    """From 0, which covers all that the teacher might say, to 1, which says what the teacher surely would."""
    aggregation: Aggregation = "token-mean"
    """How tokens become one number."""
    horizon: int = 0
    """Constant length of `seq-mean-token-sum-norm`, tokens."""

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.horizon)
        if not 0 <= self.beta <= 1:
            raise ValueError(f"DistillationLoss(beta={self.beta}): is a share. Try 0.5.")

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Loss.columns`."""
        return ("candidate_ids", "candidate_ref_log_probs")

    @property
    def candidates(self) -> str:
        """See `Loss.candidates`."""
        return "candidate_ids"

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of some rows; see `Loss`."""
        mask = rows["response_mask"]
        teacher = _with_rest(rows["candidate_ref_log_probs"], mask)
        student = _with_rest(outputs["candidate_log_probs"], mask)
        each = _divergence(teacher, student, self.beta)
        loss = aggregate(each, mask, self.aggregation, counts, horizon=self.horizon)
        student = student.detach()
        return loss, {
            "distillation/loss": loss.detach(),
            "distillation/forward_kl": token_mean(_kl(teacher, student), mask, counts.tokens),
            "distillation/reverse_kl": token_mean(_kl(student, teacher), mask, counts.tokens),
            "distillation/rest": token_mean(teacher[..., -1].exp(), mask, counts.tokens),
        }


def _with_rest(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities [n, R, k] of candidates, and of all other words as one: [n, R, k + 1] float32.

    Where the mask is False all are 0, and without a gradient.
    """
    known = torch.where(mask[..., None], log_probs.float(), 0.0)
    rest = (1 - known.exp().sum(2, keepdim=True)).clamp(min=_LEAST_REST).log()
    return torch.where(mask[..., None], torch.cat([known, rest], 2), 0.0)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q) [n, R] from log-probabilities [n, R, k]."""
    return (p.exp() * (p - q)).sum(2)


def _divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """See `DistillationLoss`: [n, R]."""
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixed = torch.logaddexp(teacher + log(beta), student + log1p(-beta))
    return beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)
