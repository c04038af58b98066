"""The estimator of PPO: advantages against a critic, with a KL penalty in the reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rlhf_lightning.functional.estimator import Add, alone
from rlhf_lightning.functional.gae import Gap, bootstrap_truncated, check_discounts, gae
from rlhf_lightning.functional.kl import penalized_rewards
from rlhf_lightning.functional.masked import masked_sum, widened, zero_masked
from rlhf_lightning.functional.penalized_estimator import PenalizedEstimator
from rlhf_lightning.functional.whiten import whiten

_ERRORS = ("row_errors", "row_error_squares")


@dataclass(frozen=True, kw_only=True)
class GAEEstimator(PenalizedEstimator):
    """Generalized advantage estimation, Schulman 2016 eq. 16, of r_t = score_t - beta kl_t, Ziegler 2019.

    Beside the columns of `PenalizedEstimator` with the divergence it reads values, and makes `rewards` and
    `returns` (in the units of the values), [B, R] float32; `row_returns` and `row_squares`, [B] float64, sums
    over tokens of the returns in the units of the rewards and of their squares, for `merged`; `row_errors`
    and `row_error_squares`, the same of what the values were wrong by, for `explained_variance`.
    """

    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Weight of longer estimates; 0 is one-step, 1 is Monte Carlo."""
    gap: Gap = "carry"
    """A masked position inside a response is nothing (`carry`, verl), or a step worth `zero` (OpenRLHF)."""
    bootstrap: bool = False
    """Value what follows a response without an end at V_last, since it was only cut off (ReaLHF, AReaL)."""
    whiten: bool = True
    """Give the advantages of the whole batch mean 0 and variance 1."""
    unbiased: bool = True
    """Divide that variance by n - 1 (verl) or, if False, by n (OpenRLHF)."""
    score_scale: float = 1.0
    """Multiplies the scores, such as the inverse of a running standard deviation."""
    score_clip: float | None = None
    """Largest absolute score after that; None is no limit."""
    value_mean: float = 0.0
    """Return that the critic's value 0 stands for, where it learns scaled returns."""
    value_std: float = 1.0
    """Return that one unit of the critic's value stands for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_discounts("GAEEstimator", gamma=self.gamma, lam=self.lam)
        if self.score_clip is not None and self.score_clip <= 0:
            raise ValueError(f"GAEEstimator(score_clip={self.score_clip}): must be above 0. Try 5.0 or None.")
        if self.value_std <= 0:
            raise ValueError(f"GAEEstimator(value_std={self.value_std}): must be above 0. Try 1.0.")

    @property
    def measures_kl(self) -> bool:
        """Always: the divergence is logged, whatever its weight."""
        return True

    @property
    def columns(self) -> tuple[str, ...]:
        """Scores, log-probabilities of policy and reference, the critic's values."""
        return (*super().columns, "values", *(("truncated_mask",) if self.bootstrap else ()))

    @property
    def returns(self) -> tuple[str, ...]:
        """Advantages and returns, what they were made of, and sums by row."""
        return (*super().returns, "rewards", "returns", "row_returns", "row_squares", *_ERRORS)

    def __call__(self, rows: Mapping[str, Tensor], add: Add = alone) -> dict[str, Tensor]:
        """Compute the new columns; see `Estimator`."""
        mask = rows["response_mask"]
        values = widened(rows["values"]) * self.value_std + self.value_mean
        found, kl = self.common_columns(rows)
        rewards = penalized_rewards(self._scores(rows["scores"], mask), kl, mask, coef=self.kl_coef)
        received = rewards
        if self.bootstrap:
            cut = rows["truncated_mask"].any(dim=1)
            received = bootstrap_truncated(rewards, values, mask, truncated=cut, gamma=self.gamma)
        advantages, returns = gae(received, values, mask, gamma=self.gamma, lam=self.lam, gap=self.gap)
        errors = (returns - zero_masked(values, mask)).double()
        if self.whiten:
            advantages = whiten(advantages, mask, unbiased=self.unbiased, add=add)
        return found | {
            "rewards": rewards,
            "advantages": advantages,
            "returns": zero_masked((returns - self.value_mean) / self.value_std, mask),
            "row_returns": masked_sum(returns.double(), mask, dim=1),
            "row_squares": masked_sum(returns.double().square(), mask, dim=1),
            "row_errors": masked_sum(errors, mask, dim=1),
            "row_error_squares": masked_sum(errors.square(), mask, dim=1),
        }

    def _scores(self, scores: Tensor, mask: Tensor) -> Tensor:
        scores = zero_masked(scores, mask) * self.score_scale
        return scores if self.score_clip is None else scores.clamp(-self.score_clip, self.score_clip)
