"""The loss of critics: PPO's clipped squared error, token by token.

Legend: B rows, R response width; everything is [B, R], computed in float32 whatever comes in. The formula
takes clean numbers; `ValueLoss` first cleans what lies under the mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_lightning.functional.aggregate import Counts, Loss, aggregate
from rlhf_lightning.functional.masked import token_mean, widened, zero_masked


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2
) -> tuple[Tensor, Tensor]:
    """PPO's clipped squared error: 0.5 max((v - R)^2, (clip(v, v_old +- clip) - R)^2).

    Args:
        values: [B, R] of the critic in training.
        old_values: [B, R] of the critic at the rollout.
        returns: [B, R].
        clip: how far a value may move from its old one; None: no clip.

    Returns:
        The loss [B, R], and [B, R] bool where the clip decided it.
    """
    values, old_values, returns = widened(values), widened(old_values), widened(returns)
    free = 0.5 * (values - returns).square()
    if clip is None:
        return free, torch.zeros_like(free, dtype=torch.bool)
    # A value within the limits stays as it is: old + (v - old) would be rounded, and some would seem clipped.
    held = 0.5 * (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(free, held), held > free


@dataclass(frozen=True, kw_only=True)
class ValueLoss(Loss):
    """The clipped squared error, mean over the tokens of the mini-batch. PPO trains its critic with it.

    Metrics, all means over the tokens of the mini-batch: critic/loss, critic/clip_fraction, critic/values,
    critic/returns, critic/squared_error.
    """

    clip: float | None = 0.2
    """How far a value may move from that of the rollout; None is no clip."""
    coef: float = 1.0
    """Weight of the loss, above 0."""

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"ValueLoss(clip={self.clip}): must be above 0. Try 0.2, or None for no clip.")
        if not float(self.coef) > 0:
            raise ValueError(
                f"ValueLoss(coef={self.coef}): must be above 0. Try 1.0; a critic that is to stay as it is "
                "has an optimizer.lr of 0."
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The rollout critic's values, and the returns."""
        return ("values", "returns")

    def __call__(
        self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of some rows; see `Loss`."""
        mask, tokens = rows["response_mask"], counts.tokens
        new, old = zero_masked(outputs["values"], mask), zero_masked(rows["values"], mask)
        returns = zero_masked(rows["returns"], mask)
        error, clipped = clipped_value_loss(new, old, returns, clip=self.clip)
        loss = self.coef * aggregate(error, mask, "token-mean", counts)
        return loss, {
            "critic/loss": loss.detach(),
            "critic/clip_fraction": token_mean(clipped, mask, tokens),
            "critic/values": token_mean(new, mask, tokens),
            "critic/returns": token_mean(returns, mask, tokens),
            "critic/squared_error": token_mean((new - returns).square(), mask, tokens),
        }
