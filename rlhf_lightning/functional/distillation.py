"""The loss of distillation: a divergence between what a teacher and a student would say in each place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, log1p

import torch
from torch import Tensor

from rlhf_lightning.functional.aggregate import Aggregation, Counts, Loss, aggregate, check_aggregation

_LEAST_REST = 1e-5
"""Least probability of the words that are no candidates: sums in float32 err by a hundredth of it."""


@dataclass(frozen=True, kw_only=True)
class DistillationLoss(Loss):
    """The generalised Jensen-Shannon divergence (Agarwal 2023, GKD, arXiv 2306.13649, section 2).

    JSD = beta KL(teacher, m) + (1 - beta) KL(student, m) with m = beta teacher + (1 - beta) student; beta 0
    is KL(teacher, student) and beta 1 KL(student, teacher), as in TRL. The k words that the teacher finds
    likeliest are told apart, and all others count as one: at most the divergence of the whole
    distributions, and equal to it where the candidates are all words.

    Metrics: distillation/loss, distillation/forward_kl, distillation/reverse_kl (means over tokens whatever
    the aggregation), distillation/rest (the teacher's probability of words that are no candidates).
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
        given = rows["candidate_ref_log_probs"], outputs["candidate_log_probs"]
        teacher, student = (_with_rest(log_probs[mask]) for log_probs in given)
        each = _divergence(teacher, student, self.beta)
        each = each.new_zeros(mask.shape).masked_scatter(mask, each)
        loss = aggregate(each, mask, self.aggregation, counts, horizon=self.horizon)
        student, tokens = student.detach(), max(counts.tokens, 1)
        return loss, {
            "distillation/loss": loss.detach(),
            "distillation/forward_kl": _kl(teacher, student).sum() / tokens,
            "distillation/reverse_kl": _kl(student, teacher).sum() / tokens,
            "distillation/rest": teacher[:, -1].exp().sum() / tokens,
        }


def _with_rest(log_probs: Tensor) -> Tensor:
    """Log-probabilities [K, k] of candidates, and of all other words as one: [K, k + 1] float32."""
    known = log_probs.float()
    rest = 1 - known.exp().sum(1, keepdim=True)
    rest = rest + (rest.clamp(min=_LEAST_REST) - rest).detach()  # the gradient stays where it is less
    return torch.cat([known, rest.log()], 1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q) [K] from log-probabilities [K, k]."""
    return (p.exp() * (p - q)).sum(1)


def _divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """See `DistillationLoss`: [K]."""
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixed = torch.logaddexp(teacher + log(beta), student + log1p(-beta))
    return beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)
