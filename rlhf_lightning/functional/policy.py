"""The loss of policies: PPO's clipped surrogate, token by token, with an entropy bonus and a KL term.

Legend: B rows, R response width; everything is [B, R], natural logarithms, computed in float32 whatever comes
in; r = log_probs - old_log_probs. The formulas take clean numbers; `PolicyLoss` first cleans what lies under
the mask. Other surrogates are subclasses, a file each: sequence_policy, geometric_policy, cispo, reinforce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_lightning.field_types import check_types
from rlhf_lightning.functional.aggregate import Aggregation, Counts, Loss, aggregate, check_aggregation
from rlhf_lightning.functional.kl import KLKind, kl_estimate
from rlhf_lightning.functional.masked import token_mean, widened, zero_masked
from rlhf_lightning.functional.off_policy import OffPolicyCorrection
from rlhf_lightning.functional.ratio import log_ratio


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate, Schulman 2017 eq. 7: max(-A e^r, -A clip(e^r, 1 - clip_low, 1 + clip_high)).

    Args:
        log_probs: [B, R] of the policy in training.
        old_log_probs: [B, R] of the policy that drew the tokens.
        advantages: [B, R].
        clip_low: how far the ratio may fall below 1.
        clip_high: how far it may rise above 1; larger than clip_low in DAPO.
        dual_clip: for A < 0, limit the loss to -dual_clip A (Ye 2020; verl always, at 3). None: no limit.

    Returns:
        The loss [B, R], and [B, R] bool where a clip decided it.
    """
    ratio, advantages = log_ratio(log_probs, old_log_probs).exp(), widened(advantages)
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, clipped = torch.maximum(free, held), held > free
    if dual_clip is not None:
        limit = -dual_clip * advantages
        limited = (advantages < 0) & (limit < loss)
        loss, clipped = torch.where(limited, limit, loss), clipped | limited
    return loss, clipped


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Loss):
    """The clipped surrogate, with an entropy bonus and a KL term if asked for: the actor of PPO and GRPO.

    A subclass replaces `surrogate`, and all else stays.

    Metrics: actor/loss (what is minimised), actor/policy_loss (the surrogate alone), actor/kl_loss if there
    is a KL term; as means over the tokens of the mini-batch actor/clip_fraction, actor/ratio, actor/approx_kl
    (k3 of the rollout's policy against the one in training) and actor/entropy; with a correction its own.
    """

    clip_low: float = 0.2
    """How far the probability ratio may fall below 1."""
    clip_high: float = 0.2
    """How far it may rise above 1."""
    dual_clip: float | None = None
    """For negative advantages A, limit the loss to -dual_clip A (Ye 2020); None is off, verl has 3."""
    aggregation: Aggregation = "token-mean"
    """How tokens become one number."""
    horizon: int = 0
    """Constant length of `seq-mean-token-sum-norm`, tokens."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl_coef: float = 0.0
    """Weight of the divergence from the reference, in the loss (GRPO); 0 leaves it out."""
    kl_estimator: KLKind = "k3"
    """Which estimate of that divergence, as in `kl_estimate`."""
    kl_weighted: bool = False
    """Multiply it by the probability ratio, gradient included (DeepSeek-V3.2)."""
    track_entropy: bool = True
    """Report the entropy without a bonus too, which costs one more pass over the probabilities."""
    correction: OffPolicyCorrection | None = None
    """Weights for tokens that another engine drew, by `rollout_log_probs`; None takes them as on-policy."""

    def __post_init__(self) -> None:
        check_types(self)
        check_aggregation(self.aggregation, self.horizon)
        self.check_clip()
        self._check_kl()

    def check_clip(self) -> None:
        """Refuse limits that the surrogate cannot have."""
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError(
                f"{type(self).__name__}(clip_low={self.clip_low}, clip_high={self.clip_high}): the ratio is "
                "kept within [1 - clip_low, 1 + clip_high], so 0 <= clip_low <= 1 and clip_high >= 0. "
                "Try 0.2 and 0.2."
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(
                f"{type(self).__name__}(dual_clip={self.dual_clip}): must be above 1. Try 3.0 or None."
            )

    def _check_kl(self) -> None:
        if self.kl_coef < 0:
            raise ValueError(
                f"{type(self).__name__}(kl_coef={self.kl_coef}): a penalty is not negative. "
                "Try 0.001, or 0 for none."
            )
        for name in ("kl_estimator", "kl_weighted"):
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default and not self.kl_coef:
                raise ValueError(
                    f"{type(self).__name__}({name}={value!r}): nothing reads it, since kl_coef is 0. "
                    f"Give kl_coef a weight, such as 0.001, or leave {name} out."
                )

    @property
    def columns(self) -> tuple[str, ...]:
        """Old log-probabilities and advantages; the reference's for a KL term, the rollout's to correct."""
        more = (("ref_log_probs", self.kl_coef), ("rollout_log_probs", self.correction))
        return ("log_probs", "advantages", *(name for name, needed in more if needed))

    @property
    def needs_entropy(self) -> bool:
        """For the bonus, or for the metric."""
        return self.entropy_coef != 0 or self.track_entropy

    def surrogate(self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The part of the loss with the advantages, which a subclass replaces.

        Args:
            new: [B, R] log-probabilities of the policy in training, 0 where the mask is False.
            old: [B, R] those of the policy that drew the tokens, 0 there too.
            advantages: [B, R], 0 there too.
            mask: [B, R] bool.

        Returns:
            The loss of each token [B, R], and [B, R] bool where a clip decided it; finite under the mask too.
        """
        return clipped_policy_loss(
            new,
            old,
            advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of some rows; see `Loss`."""
        mask, tokens = rows["response_mask"], counts.tokens
        new, old = zero_masked(outputs["log_probs"], mask), zero_masked(rows["log_probs"], mask)
        surrogate, clipped = self.surrogate(new, old, zero_masked(rows["advantages"], mask), mask)
        metrics = {
            "actor/clip_fraction": token_mean(clipped, mask, tokens),
            "actor/approx_kl": token_mean(kl_estimate(old, new, "k3"), mask, tokens),
            "actor/ratio": token_mean(log_ratio(new, old).exp(), mask, tokens),
        }
        if self.correction is not None:
            weights, found = self.correction(old, rows["rollout_log_probs"], mask, num_tokens=tokens)
            surrogate, metrics = surrogate * weights, metrics | found
        loss = policy_loss = self._aggregate(surrogate, mask, counts)
        if self.needs_entropy:
            metrics["actor/entropy"] = token_mean(outputs["entropy"], mask, tokens)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * self._aggregate(outputs["entropy"], mask, counts)
        if self.kl_coef:
            kl = kl_estimate(new, rows["ref_log_probs"], self.kl_estimator, mask=mask)
            if self.kl_weighted:
                kl = kl * log_ratio(new, old).exp()
            kl_loss = self._aggregate(kl, mask, counts)
            metrics["actor/kl_loss"] = kl_loss.detach()
            loss = loss + self.kl_coef * kl_loss
        return loss, metrics | {"actor/policy_loss": policy_loss.detach(), "actor/loss": loss.detach()}

    def _aggregate(self, x: Tensor, mask: Tensor, counts: Counts) -> Tensor:
        return aggregate(x, mask, self.aggregation, counts, horizon=self.horizon)
