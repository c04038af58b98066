"""ReMax: REINFORCE with the greedy answer's score as the baseline, no critic (Li 2023)."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import GreedyEstimator, PolicyLoss, ReinforceLoss, masked_sum, reads_reference
from rlhf_lightning.workers import Actor, Reference, Reward


class ReMax(RLHFAlgorithm):
    """HybridFlow Figure 6, middle: PPO plus one greedy generation, minus the critic."""

    actor: Actor = field(default_factory=Actor)
    """Answers, and learns to answer better."""
    reference: Reference = field(default_factory=Reference)
    """What the actor is kept close to."""
    reward: Reward = field(default_factory=Reward)
    """Scores the answers."""
    policy_loss: PolicyLoss = field(default_factory=ReinforceLoss)
    """The actor's loss."""
    group_size: int = 1
    """Answers to each prompt, all compared with its one greedy answer."""
    form: Literal["official", "verl"] = "official"
    """Penalise each token with its own divergence, or with all that follows it."""
    gamma: float = 1.0
    """Discount per token."""
    clip: float | None = None
    """Limit of what an answer gains over the greedy one."""
    reward_kl_coef: float = 0.05
    """Weight of the KL penalty in the reward."""
    epochs: int = 1
    """Passes over each batch."""
    mini_batch_size: int = 0
    """Rows (answers) per optimizer step; 0 is the whole batch."""

    def __post_init__(self) -> None:
        """Refuse no answers, ones that are all the greedy one, and what its estimator refuses."""
        if self.group_size < 1:
            raise ValueError(f"group_size={self.group_size}: a prompt has at least 1 answer. Try 1, or 4.")
        self.refuse_greedy("ReMax compares drawn answers with the greedy one")
        self.estimator()

    def step(self, batch: Batch) -> Metrics:
        """One iteration."""
        batch |= self.greedy_scores(batch)
        batch = self.answers_to(batch, self.group_size)
        batch |= self.actor.generate_sequences(batch)
        if "reference" not in self.uncalled():
            batch |= self.reference.compute_ref_log_prob(batch)
        batch |= self.reward.compute_reward(batch)
        batch, metrics = self.compute_advantage(batch)
        for mini in self.mini_batches(batch, size=self.mini_batch_size, epochs=self.epochs):
            metrics |= self.actor.update_actor(mini, loss=self.policy_loss)
        return metrics

    def greedy_scores(self, batch: Batch) -> Batch:
        """The column `greedy_scores` [B] float32: what the likeliest answers earn."""
        batch |= self.actor.generate_sequences(batch, greedy=True)
        scores = self.reward.compute_reward(batch)["scores"]
        return Batch.of({"greedy_scores": masked_sum(scores, batch["response_mask"], dim=1)})

    def uncalled(self) -> tuple[str, ...]:
        """A reference that neither the estimator nor the loss reads."""
        return () if reads_reference(self.estimator(), self.policy_loss) else ("reference",)

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Add `advantages` [B, R] float32: each answer's distance from the greedy one."""
        batch = self.estimate(batch, self.estimator())
        return batch, Metrics.of(self.rollout_metrics(batch))

    def estimator(self) -> GreedyEstimator:
        """What makes the advantages of a batch."""
        return GreedyEstimator(form=self.form, gamma=self.gamma, clip=self.clip, kl_coef=self.reward_kl_coef)
