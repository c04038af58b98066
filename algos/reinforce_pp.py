"""REINFORCE++: discounted rewards with the KL in them, whitened over the batch, no critic (Hu 2025)."""

from __future__ import annotations

from dataclasses import field

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import PolicyLoss, ReturnEstimator, reads_reference
from rlhf_lightning.workers import Actor, Reference, Reward


class ReinforcePP(RLHFAlgorithm):
    """Hu 2025, algorithm 1; `group_size` above 1 is the variant with the group's mean as the baseline."""

    actor: Actor = field(default_factory=Actor)
    """Answers, and learns to answer better."""
    reference: Reference = field(default_factory=Reference)
    """What the actor is kept close to."""
    reward: Reward = field(default_factory=Reward)
    """Scores the answers."""
    policy_loss: PolicyLoss = field(default_factory=PolicyLoss)
    """The actor's loss."""
    group_size: int = 1
    """Answers to each prompt."""
    gamma: float = 1.0
    """Discount per token."""
    reward_kl_coef: float = 0.01
    """Weight of the KL penalty in the reward."""
    epochs: int = 1
    """Passes over each batch."""
    mini_batch_size: int = 0
    """Rows (answers) per optimizer step; 0 is the whole batch."""

    def __post_init__(self) -> None:
        """Refuse a group size or a discount outside its range."""
        if self.group_size < 1:
            raise ValueError(f"group_size={self.group_size}: a prompt has at least 1 answer. Try 1, or 8.")
        if self.group_size > 1:
            self.refuse_greedy(f"group_size={self.group_size}")
        self.estimator()

    def step(self, batch: Batch) -> Metrics:
        """One iteration."""
        batch = self.answers_to(batch, self.group_size)
        batch |= self.actor.generate_sequences(batch)
        if "reference" not in self.uncalled():
            batch |= self.reference.compute_ref_log_prob(batch)
        batch |= self.reward.compute_reward(batch)
        batch, metrics = self.compute_advantage(batch)
        for mini in self.mini_batches(batch, size=self.mini_batch_size, epochs=self.epochs):
            metrics |= self.actor.update_actor(mini, loss=self.policy_loss)
        return metrics

    def uncalled(self) -> tuple[str, ...]:
        """A reference that neither the estimator nor the loss reads."""
        return () if reads_reference(self.estimator(), self.policy_loss) else ("reference",)

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Add `advantages` [B, R] float32: the return from each token on, whitened over the batch."""
        batch = self.estimate(batch, self.estimator())
        return batch, Metrics.of(self.rollout_metrics(batch))

    def estimator(self) -> ReturnEstimator:
        """What makes the advantages of a batch."""
        return ReturnEstimator(gamma=self.gamma, kl_coef=self.reward_kl_coef, group_size=self.group_size)
