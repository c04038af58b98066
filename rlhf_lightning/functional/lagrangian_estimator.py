"""The estimator of Safe-RLHF: a reward under a constraint on a cost (Dai 2023, arXiv 2310.12773)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rlhf_lightning.functional.estimator import Add, alone
from rlhf_lightning.functional.gae import Gap, check_discounts, gae
from rlhf_lightning.functional.kl import penalized_rewards
from rlhf_lightning.functional.penalized_estimator import PenalizedEstimator
from rlhf_lightning.functional.returns import discounted_returns
from rlhf_lightning.functional.whiten import whiten


@dataclass(frozen=True, kw_only=True)
class LagrangianEstimator(PenalizedEstimator):
    """A = (A_r - L A_c) / (1 + L) of r_t = R - beta kl_t and c_t = C + beta kl_t; Safe RLHF appendix B.

    The penalty is in both, as in the authors' code. R and C are at the last valid token. Each advantage is
    estimated against its own critic; without a critic of costs A_c is the discounted cost still to come.

    Beside the columns of `PenalizedEstimator` with the divergence it reads costs [B, R] (as scores), values
    and, with a critic of costs, cost_values; it makes `returns` and `cost_returns` [B, R] float32 too.
    """

    multiplier: float = 1.0
    """L, the Lagrange multiplier: reward that a unit of cost outweighs."""
    cost_critic: bool = True
    """Whether a critic estimates the costs."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Weight of longer estimates; 0 is one-step, 1 is Monte Carlo."""
    gap: Gap = "carry"
    """What a masked position inside a response is: nothing (`carry`), or a step worth `zero`."""
    kl_coef: float = 0.01
    """beta, weight of the KL penalty in reward and cost."""
    clip: float | None = 50.0
    """Largest absolute reward and cost of a token, penalty included; None is no limit."""
    whiten: bool = False
    """Give the advantages of the whole batch mean 0 and variance 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_discounts("LagrangianEstimator", gamma=self.gamma, lam=self.lam)
        if self.multiplier < 0:
            raise ValueError(f"LagrangianEstimator(multiplier={self.multiplier}): must not be below 0.")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"LagrangianEstimator(clip={self.clip}): must be above 0. Try 50.0 or None.")

    @property
    def measures_kl(self) -> bool:
        """Always: the divergence is logged, whatever its weight."""
        return True

    @property
    def columns(self) -> tuple[str, ...]:
        """Scores and costs, log-probabilities of policy and reference, values of the critics."""
        return (*super().columns, "costs", "values", *(("cost_values",) if self.cost_critic else ()))

    @property
    def returns(self) -> tuple[str, ...]:
        """Advantages, returns of reward and cost, and sums by row."""
        return (*super().returns, "returns", "cost_returns")

    def __call__(self, rows: Mapping[str, Tensor], add: Add = alone) -> dict[str, Tensor]:
        """Compute the new columns; see `Estimator`."""
        mask = rows["response_mask"]
        found, kl = self.common_columns(rows)
        rewards = self._limited(penalized_rewards(rows["scores"], kl, mask, coef=self.kl_coef))
        costs = self._limited(penalized_rewards(rows["costs"], kl, mask, coef=-self.kl_coef))
        advantages, returns = self._estimated(rewards, rows["values"], mask)
        if self.cost_critic:
            cost_advantages, cost_returns = self._estimated(costs, rows["cost_values"], mask)
        else:
            cost_returns = discounted_returns(costs, mask, gamma=self.gamma, gap=self.gap)
            cost_advantages = cost_returns
        advantages = (advantages - self.multiplier * cost_advantages) / (1 + self.multiplier)
        return found | {
            "advantages": whiten(advantages, mask, add=add) if self.whiten else advantages,
            "returns": returns,
            "cost_returns": cost_returns,
        }

    def _estimated(self, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return gae(rewards, values, mask, gamma=self.gamma, lam=self.lam, gap=self.gap)

    def _limited(self, rewards: Tensor) -> Tensor:
        return rewards if self.clip is None else rewards.clamp(-self.clip, self.clip)
