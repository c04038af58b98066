"""KTO: the loss of a policy that learns from single answers labelled desirable or undesirable.

Legend: B rows, R response width; r = sum_t (log_probs - ref_log_probs); z0 the baseline. Ethayarajh 2024,
arXiv 2402.01306.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_lightning.functional.aggregate import Counts, Loss
from rlhf_lightning.functional.masked import masked_mean, masked_sum, widened, zero_masked


def kto_baseline(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Estimate how far the policy is from the reference: z0 = max(0, mean over rows of r).

    The rows must be mismatched pairs, such as answer i as the answer to prompt i + 1, as in the paper and in
    TRL: from the answers that it learns from the estimate would be biased.

    Args:
        log_probs: [B, R] of the policy, of the whole mini-batch.
        ref_log_probs: [B, R] of the reference.
        mask: [B, R] bool; a fully masked row does not count.

    Returns:
        A scalar without gradient, float32, 0 if no row counts.
    """
    d = zero_masked(log_probs.detach(), mask) - zero_masked(ref_log_probs, mask)
    return masked_mean(d.sum(dim=1), mask.any(dim=1)).clamp(min=0)


def of_other_prompts(prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor | None:
    """For each row one with another prompt, all of them equally far before it: each answer is taken once.

    Where no distance does, as where one prompt has most rows, it is the nearest such row before it,
    cyclically.

    Args:
        prompt_ids: [B, P] int64.
        prompt_mask: [B, P] bool.

    Returns:
        Row numbers [B] int64, None if all rows have the same prompt.
    """
    texts = [tuple(ids[kept].tolist()) for ids, kept in zip(prompt_ids, prompt_mask, strict=True)]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    prompts, places = torch.tensor([numbers[text] for text in texts]), torch.arange(len(texts))
    if len(numbers) < 2:
        return None
    shifts = range(1, len(texts))
    for shift in shifts:
        if (prompts != prompts.roll(shift)).all():
            return (places - shift) % len(texts)
    differs = torch.stack([prompts != prompts.roll(shift) for shift in shifts])
    return (places - 1 - differs.int().argmax(dim=0)) % len(texts)


def kto_loss(
    r: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Compute the loss of each row, eq. 7: weight (1 - sigma(s beta (r - z0))), s = +1 if desirable, else -1.

    Args:
        r: [B], log-ratio of the answer.
        desirable: [B] bool.
        baseline: z0, a scalar or [B].
        beta: how strongly the policy is held to the reference.
        desirable_weight: of the desirable rows, lambda_D.
        undesirable_weight: of the others, lambda_U.

    Returns:
        [B] float32.
    """
    above = beta * (widened(r) - widened(baseline))
    # 1 - sigma(x) = sigma(-x), without the difference of two numbers close to 1
    return torch.where(
        desirable, desirable_weight * torch.sigmoid(-above), undesirable_weight * torch.sigmoid(above)
    )


@dataclass(frozen=True, kw_only=True)
class KTOLoss(Loss):
    """The loss of KTO, mean over the rows of the mini-batch.

    The baseline comes as a column, since it is one number of the whole mini-batch: see `kto_baseline`.

    Metrics: kto/loss (what is minimised), kto/kl (z0), kto/desirable_reward and kto/undesirable_reward (mean
    of beta r over the rows of that label, left out if there are none), kto/margin (their difference, left out
    with either). An iteration logs each one's mean over the mini-batches that have it: where some lack a
    label, the margin is not the difference of the two means.
    """

    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    desirable_weight: float = 1.0
    """Weight of desirable rows. The paper (eq. 8): weight times rows of the desirable between 1 and 4/3 of
    that of the undesirable."""
    undesirable_weight: float = 1.0
    """Weight of undesirable rows."""
    baseline: bool = True
    """Read `kl_baseline`; False: z0 = 0, which is APO-zero on unpaired answers (D'Oosterlinck 2024, TRL)."""

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"KTOLoss(beta={self.beta}): must be above 0. Try 0.1.")
        if min(self.desirable_weight, self.undesirable_weight) < 0:
            raise ValueError(
                f"KTOLoss(desirable_weight={self.desirable_weight}, undesirable_weight="
                f"{self.undesirable_weight}): weights must not be below 0. Try 1.0 and 1.0."
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The reference's log-probabilities, `labels` [n] (above 0: desirable) and `kl_baseline` [n]."""
        return ("ref_log_probs", "labels") + (("kl_baseline",) if self.baseline else ())

    def count(self, rows: Mapping[str, Tensor]) -> Counts:
        """Rows, and as groups the desirable ones among them."""
        mask = rows["response_mask"]
        return replace(Counts.of(mask), groups=int((mask.any(dim=1) & (rows["labels"] > 0)).sum()))

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of some rows; see `Loss`."""
        mask, desirable = rows["response_mask"], rows["labels"] > 0
        valid, num_rows = mask.any(dim=1), max(counts.sequences, 1)
        r = (zero_masked(outputs["log_probs"], mask) - zero_masked(rows["ref_log_probs"], mask)).sum(dim=1)
        z0 = zero_masked(rows["kl_baseline"], valid) if self.baseline else torch.zeros_like(r)
        each = kto_loss(
            r,
            desirable,
            z0.detach(),
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        loss = masked_sum(each, valid) / num_rows
        rewards = self.beta * r.detach()
        metrics = {"kto/loss": loss.detach(), "kto/kl": z0.detach().sum() / num_rows}
        labels = {"desirable": (desirable, counts.groups)}
        labels["undesirable"] = (~desirable, counts.sequences - counts.groups)
        means = {
            f"kto/{label}_reward": masked_sum(rewards, valid & those) / count
            for label, (those, count) in labels.items()
            if count
        }
        if len(means) == len(labels):
            means["kto/margin"] = means["kto/desirable_reward"] - means["kto/undesirable_reward"]
        return loss, metrics | means
