"""PPO: proximal policy optimisation with a critic and KL-penalised rewards (Ziegler 2019, Ouyang 2022)."""

from __future__ import annotations

from dataclasses import field

import torch

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import (
    KLKind,
    PolicyLoss,
    ValueLoss,
    adapted_kl_coef,
    gae,
    kl_estimate,
    penalized_rewards,
    rollout_metrics,
    sequence_kl,
    whiten,
)
from rlhf_lightning.workers import Actor, Critic, Reference, Reward


class PPO(RLHFAlgorithm):
    """HybridFlow Figure 6, left."""

    actor: Actor = field(default_factory=Actor)
    """Answers, and learns to answer better."""
    critic: Critic = field(default_factory=Critic)
    """Estimates what is still to come."""
    reference: Reference = field(default_factory=Reference)
    """What the actor is kept close to."""
    reward: Reward = field(default_factory=Reward)
    """Scores the answers."""
    policy_loss: PolicyLoss = field(default_factory=PolicyLoss)
    """The actor's loss."""
    value_loss: ValueLoss = field(default_factory=ValueLoss)
    """The critic's loss."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Weight of longer advantage estimates."""
    whiten: bool = True
    """Give the advantages of the whole batch mean 0 and variance 1."""
    kl_coef: float = 0.05
    """Weight of the KL penalty in the reward; where it starts, if it adapts."""
    kl_estimator: KLKind = "k1"
    """Which estimate of the divergence."""
    kl_target: float | None = None
    """Divergence that the coefficient is steered to, nats per token; None keeps it fixed."""
    kl_horizon: float = 10_000.0
    """Rows over which it is steered."""
    epochs: int = 1
    """Passes over each batch."""
    mini_batch_size: int = 0
    """Rows per optimizer step; 0 is the whole batch."""
    critic_warmup_steps: int = 0
    """Iterations at the start in which only the critic learns."""

    def __post_init__(self) -> None:
        """Keep the adaptive coefficient where checkpoints find it."""
        self.register_buffer("kl_coefficient", torch.tensor(self.kl_coef, dtype=torch.float64))

    def step(self, batch: Batch) -> Metrics:
        """One iteration."""
        batch |= self.actor.generate_sequences(batch)
        batch |= self.critic.compute_values(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        batch |= self.reward.compute_reward(batch)
        batch, metrics = self.compute_advantage(batch)
        for mini in self.mini_batches(batch, size=self.mini_batch_size, epochs=self.epochs):
            metrics |= self.critic.update_critic(mini, loss=self.value_loss)
            if self.global_step >= self.critic_warmup_steps:
                metrics |= self.actor.update_actor(mini, loss=self.policy_loss)
        return metrics

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Add `rewards`, `advantages` and `returns`, [B, R] float32; adapt the KL coefficient."""
        mask, scores, values = batch["response_mask"], batch["scores"], batch["values"]
        coef = float(self.get_buffer("kl_coefficient"))
        kl = kl_estimate(batch["log_probs"], batch["ref_log_probs"], self.kl_estimator, mask=mask)
        rewards = penalized_rewards(scores, kl, mask, coef=coef)
        advantages, returns = gae(rewards, values, mask, gamma=self.gamma, lam=self.lam)
        if self.whiten:
            advantages = whiten(advantages, mask)
        current = float(sequence_kl(kl, mask))
        if self.kl_target is not None and self.trainer.training:
            self.get_buffer("kl_coefficient").fill_(
                adapted_kl_coef(
                    coef, current=current, target=self.kl_target, horizon=self.kl_horizon, num_rows=len(batch)
                )
            )
        found = {"rewards": rewards, "advantages": advantages, "returns": returns, "kl": kl}
        metrics = Metrics.of(rollout_metrics(scores, mask) | {"actor/kl": current, "actor/kl_coef": coef})
        return batch | Batch.of(found), metrics

    def explain(self, batch: Batch) -> Batch:
        """Add per-token divergence, values and advantages."""
        batch |= self.critic.compute_values(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        return self.compute_advantage(batch)[0]
