"""SafeRLHF: as much reward as a limit on the cost allows: PPO with a Lagrange multiplier (Dai 2023)."""

from __future__ import annotations

import math
from dataclasses import field

import torch

from rlhf_lightning.algos.ppo import PPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import LagrangianEstimator, masked_sum
from rlhf_lightning.running import KLPenalty, Scaling
from rlhf_lightning.workers import Cost, Critic


class SafeRLHF(PPO):
    """HybridFlow Figure 6, right: PPO plus a cost model, its critic, a multiplier and a pre-training loss."""

    cost: Cost = field(default_factory=Cost)
    """Scores the harm that answers do; the mean of its scores is to stay below `threshold`."""
    cost_critic: Critic | None = field(default_factory=Critic)
    """Estimates the cost still to come; None (as in HybridFlow's figure) takes the observed cost instead."""
    threshold: float = 0.0
    """Mean cost of an answer that is allowed."""
    multiplier: float = 1.0
    """How much a unit of cost weighs against a unit of reward at the start."""
    multiplier_max: float = 5.0
    """The most that it may weigh."""
    multiplier_lr: float = 0.1
    """Rate at which it follows the excess of the cost; 0 leaves it as it is."""
    window: int = 128
    """Answers over which the mean cost is taken."""
    whiten: bool = False
    """Give the advantages of the whole batch mean 0 and variance 1."""
    kl: KLPenalty = field(default_factory=lambda: KLPenalty(coef=0.01))
    """The KL penalty in the reward, and in the cost."""

    def __post_init__(self) -> None:
        """Refuse impossible options, and register the multiplier and the last costs for checkpoints."""
        super().__post_init__()
        if not 0 < self.multiplier <= self.multiplier_max or self.window < 1:
            raise ValueError(
                f"multiplier={self.multiplier}, multiplier_max={self.multiplier_max}, window={self.window}: "
                "0 < multiplier <= multiplier_max, over at least 1 answer. Try 1.0, 5.0 and 128."
            )
        if self.scaling != Scaling():
            raise ValueError("scaling: rewards and costs are weighed in their own units here. Leave it out.")
        self.register_buffer("log_multiplier", torch.tensor(math.log(self.multiplier), dtype=torch.float64))
        self.register_buffer("costs", torch.full((self.window,), math.nan, dtype=torch.float64))

    def step(self, batch: Batch) -> Metrics:
        """One iteration."""
        batch |= self.actor.generate_sequences(batch)
        batch |= self.critic.compute_values(batch)
        batch |= self.compute_cost_values(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        batch |= self.reward.compute_reward(batch)
        batch |= self.cost.compute_cost(batch)
        batch, metrics = self.compute_advantage(batch)
        for mini in self.mini_batches(batch, size=self.mini_batch_size, epochs=self.epochs):
            metrics |= self.critic.update_critic(mini, loss=self.value_loss)
            metrics |= self.update_cost_critic(mini)
            metrics |= self.update_actor(mini)
        return metrics

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Move the multiplier after the mean cost if the actor learns; weigh reward against cost with it."""
        costs = masked_sum(batch["costs"].double(), batch["response_mask"], dim=1)
        if self.trainer.training and len(costs):
            last = self.get_buffer("costs")
            last.copy_(torch.cat([last, costs])[-self.window :])
            if self.global_step >= self.critic_warmup_steps:
                excess = float(last.nanmean()) - self.threshold
                log = self.get_buffer("log_multiplier")
                log += self.multiplier_lr * excess * log.exp()
                log.clamp_(max=math.log(self.multiplier_max))
        batch, metrics = super().compute_advantage(batch)
        found = {"cost/multiplier": float(self.get_buffer("log_multiplier").exp())}
        if len(costs):
            found["cost/mean"] = float(costs.mean())
        return batch, metrics | Metrics.of(found)

    def estimator(self, batch: Batch) -> LagrangianEstimator:
        """What makes the advantages of a batch."""
        return LagrangianEstimator(
            gamma=self.gamma,
            lam=self.lam,
            whiten=self.whiten,
            kl_coef=self.running.coef,
            kl_estimator=self.kl.estimator,
            multiplier=float(self.get_buffer("log_multiplier").exp()),
            cost_critic=self.cost_critic is not None,
        )

    def explain(self, batch: Batch) -> Batch:
        """Add per-token divergence, values and advantages."""
        return super().explain(batch | self.compute_cost_values(batch))

    def evaluate(self, batch: Batch) -> Batch:
        """Count the cost of greedy answers too."""
        rows = super().evaluate(batch)
        rows |= self.cost.compute_cost(rows)
        costs = masked_sum(rows["costs"], rows["response_mask"], dim=1)
        self.log("val/cost", costs.mean(), batch_size=len(rows))
        return rows

    def compute_cost_values(self, batch: Batch) -> Batch:
        """The column `cost_values` [B, R] float32, where there is a critic for it."""
        if self.cost_critic is None:
            return Batch({}, num_rows=len(batch))
        return self.cost_critic.compute_values(batch).renamed({"values": "cost_values"})

    def update_cost_critic(self, mini: Batch) -> Metrics:
        """One optimizer step of the critic of the cost, where there is one."""
        if self.cost_critic is None:
            return Metrics()
        mini = mini.renamed({"cost_values": "values", "cost_returns": "returns"})
        return self.cost_critic.update_critic(mini, loss=self.value_loss).moved("critic", to="cost_critic")
