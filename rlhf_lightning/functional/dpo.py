"""DPO and its relatives: losses of a policy that learns from pairs, with its log-ratios as rewards.

Legend: B rows, R response width, P pairs (see `pairs`); d = log_probs - ref_log_probs; r = sum_t d, or
mean_t d where lengths are averaged out; h = r(chosen) - r(rejected).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_lightning.functional.aggregate import Counts
from rlhf_lightning.functional.masked import masked_mean, widened, zero_masked
from rlhf_lightning.functional.pairs import PairLoss, count_pairs, pair_mean, sft_term, split_pairs

PreferenceKind = Literal["sigmoid", "robust", "ipo", "hinge"]


def preference_loss(
    h: Tensor, *, kind: PreferenceKind = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:
    """Compute the loss of each pair from h, the difference of its log-ratios.

    With s = label_smoothing, the share of pairs whose labels are believed to be swapped:
        sigmoid: -(1 - s) log sigma(beta h) - s log sigma(-beta h)
            (DPO, Rafailov 2023 eq. 7; with s > 0 the conservative form, Mitchell 2023)
        robust: (-(1 - s) log sigma(beta h) + s log sigma(-beta h)) / (1 - 2 s)
            (unbiased under swapped labels, Chowdhury 2024, arXiv 2403.00409)
        ipo: (h - 1 / (2 beta))^2 (Azar 2023, arXiv 2310.12036 eq. 17, whose tau is beta)
        hinge: max(0, 1 - beta h) (SLiC, Zhao 2023, on DPO's rewards: Liu 2023, arXiv 2309.06657)

    Args:
        h: [P], the number of the chosen answer minus that of the rejected.
        kind: which loss.
        beta: how strongly it is held to the reference.
        label_smoothing: s.

    Returns:
        [P] float32.
    """
    check_preference(kind, label_smoothing)
    h = widened(h)
    if kind == "ipo":
        return (h - 1 / (2 * beta)).square()
    if kind == "hinge":
        return (1 - beta * h).relu()
    right, swapped = -logsigmoid(beta * h), -logsigmoid(-beta * h)
    if kind == "robust":
        return ((1 - label_smoothing) * right - label_smoothing * swapped) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * right + label_smoothing * swapped


def check_preference(kind: PreferenceKind, label_smoothing: float) -> None:
    """Refuse an unknown kind, and a label smoothing outside [0, 0.5) or that the kind does not have."""
    known = get_args(PreferenceKind)
    if kind not in known:
        raise ValueError(f"kind={kind!r}: unknown preference loss. Try one of {', '.join(known)}.")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing}: it is the share of swapped labels, at least 0; from 0.5 on "
            "labels would say nothing, or the opposite. Try 0.0 or 0.1."
        )
    if label_smoothing and kind not in ("sigmoid", "robust"):
        raise ValueError(
            f"label_smoothing={label_smoothing} with kind={kind!r}: only 'sigmoid' and 'robust' smooth "
            "labels. Set label_smoothing to 0.0, or kind to 'sigmoid'."
        )


def preference_metrics(
    chosen: Tensor, rejected: Tensor, mask: Tensor, counts: Counts, *, prefix: str
) -> dict[str, Tensor]:
    """Compute these rows' part of the metrics that every loss on pairs reports.

    Args:
        chosen: [P], reward of the chosen answers.
        rejected: [P], of the rejected ones.
        mask: [B, R] bool.
        counts: of the whole mini-batch.
        prefix: beginning of their names.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        f"{prefix}accuracy": pair_mean(chosen > rejected, mask, counts),
        f"{prefix}margin": pair_mean(chosen - rejected, mask, counts),
        f"{prefix}chosen_reward": pair_mean(chosen, mask, counts),
        f"{prefix}rejected_reward": pair_mean(rejected, mask, counts),
    }


@dataclass(frozen=True, kw_only=True)
class DPOLoss(PairLoss):
    """The loss of DPO and of its relatives, mean over the pairs of the mini-batch.

    Metrics: dpo/loss (what is minimised); as means over the pairs dpo/accuracy (pairs whose chosen answer
    has the higher reward), dpo/chosen_reward and dpo/rejected_reward (beta sum_t d as in TRL, whatever the
    kind), dpo/margin (their difference) and dpo/chosen_log_prob (sum over the answer); dpo/sft_loss (nats
    per token) if there is a likelihood term.
    """

    kind: PreferenceKind = "sigmoid"
    """Which loss; see `preference_loss`."""
    beta: float = 0.1
    """How strongly the policy is held to the reference; tau in IPO."""
    label_smoothing: float = 0.0
    """Share of pairs whose labels are believed to be swapped: cDPO with `sigmoid`, rDPO with `robust`."""
    length_average: bool | None = None
    """Log-ratios as means over tokens, not sums. None: for `ipo` alone, as TRL does and IPO's authors did;
    the formula of IPO's paper sums. With `sigmoid` the length-normalised DPO of Tulu 3."""
    sft_coef: float = 0.0
    """Weight of the chosen answers' negative log-likelihood, mean over their tokens as in TRL; RPO (Pang
    2024, arXiv 2404.19733 eq. 1) averages each answer first."""

    def __post_init__(self) -> None:
        check_preference(self.kind, self.label_smoothing)
        if self.beta <= 0 or self.sft_coef < 0:
            raise ValueError(
                f"DPOLoss(beta={self.beta}, sft_coef={self.sft_coef}): beta must be above 0 and sft_coef "
                "not below. Try 0.1 and 0.0."
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The reference's log-probabilities."""
        return ("ref_log_probs",)

    def count(self, rows: Mapping[str, Tensor]) -> Counts:
        """Pairs, and tokens of chosen answers."""
        return count_pairs(rows["response_mask"])

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of some rows; see `Loss`."""
        mask = rows["response_mask"]
        log_probs = zero_masked(outputs["log_probs"], mask)
        d = log_probs - zero_masked(rows["ref_log_probs"], mask)
        average = self.kind == "ipo" if self.length_average is None else self.length_average
        chosen, rejected = split_pairs(masked_mean(d, mask, dim=1) if average else d.sum(dim=1))
        each = preference_loss(
            chosen - rejected, kind=self.kind, beta=self.beta, label_smoothing=self.label_smoothing
        )
        loss = pair_mean(each, mask, counts)
        rewards = split_pairs(self.beta * d.sum(dim=1))
        metrics = preference_metrics(*rewards, mask, counts, prefix="dpo/")
        of_chosen = split_pairs(log_probs.detach().sum(dim=1))[0]
        metrics["dpo/chosen_log_prob"] = pair_mean(of_chosen, mask, counts)
        sft, of_sft = sft_term(log_probs, mask, counts, coef=self.sft_coef, prefix="dpo/")
        loss = loss + sft
        return loss, metrics | of_sft | {"dpo/loss": loss.detach()}
