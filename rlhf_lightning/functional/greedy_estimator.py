"""The estimator of ReMax: advantages against the greedy answer to a prompt (Li 2023, arXiv 2310.10505)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlhf_lightning.functional.estimator import Add, alone
from rlhf_lightning.functional.gae import check_discounts
from rlhf_lightning.functional.kl import penalized_rewards
from rlhf_lightning.functional.penalized_estimator import PenalizedEstimator
from rlhf_lightning.functional.returns import remax_advantages, remax_returns


@dataclass(frozen=True, kw_only=True)
class GreedyEstimator(PenalizedEstimator):
    """The outcome of a sampled answer less that of the greedy one, in the authors' form or in verl's.

    The columns are those of `PenalizedEstimator`; it reads greedy_scores [B] too, the outcome of the greedy
    answer.
    """

    form: Literal["official", "verl"] = "official"
    """`official` is `remax_advantages`, the authors' code; `verl` is `remax_returns`."""
    gamma: float = 1.0
    """Discount per token; verl has none."""
    clip: float | None = None
    """Largest absolute difference of outcomes, for `official` only (5 in the authors' code); None: no
    limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_discounts("GreedyEstimator", gamma=self.gamma)
        if self.clip is not None and (self.clip <= 0 or self.form == "verl"):
            raise ValueError(
                f"GreedyEstimator(form={self.form!r}, clip={self.clip}): a limit must be above 0, and "
                "form='verl' has none. Try clip=5.0 with form='official', or clip=None."
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Mask, both scores; log-probabilities for the divergence."""
        return (*super().columns, "greedy_scores")

    def __call__(self, rows: Mapping[str, Tensor], add: Add = alone) -> dict[str, Tensor]:
        """Compute the new columns; see `Estimator`."""
        mask, greedy = rows["response_mask"], rows["greedy_scores"]
        found, kl = self.common_columns(rows)
        if self.form == "official":
            margins = found["row_scores"] - greedy
            advantages = remax_advantages(margins, self.kl_coef * kl, mask, gamma=self.gamma, clip=self.clip)
        else:
            rewards = penalized_rewards(rows["scores"], kl, mask, coef=self.kl_coef)
            advantages = remax_returns(rewards, greedy, mask, gamma=self.gamma)
        return found | {"advantages": advantages}
