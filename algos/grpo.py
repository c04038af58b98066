"""GRPO: advantages from a group of answers to the same prompt, no critic (Shao 2024, DeepSeekMath)."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import Baseline, GroupEstimator, PolicyLoss, reads_reference, row_ends
from rlhf_lightning.workers import Actor, Reference, Reward


def grpo_loss() -> PolicyLoss:
    """The clipped surrogate as a mean over rows of means over tokens, with the KL term in the loss."""
    return PolicyLoss(aggregation="seq-mean-token-mean", kl_coef=0.001)


class GRPO(RLHFAlgorithm):
    """DeepSeekMath eq. 3; Dr.GRPO with `scale=none` and `policy_loss.aggregation=seq-mean-token-sum-norm`."""

    actor: Actor = field(default_factory=Actor)
    """Answers, and learns to answer better."""
    reference: Reference = field(default_factory=Reference)
    """What the actor is kept close to; loaded only where something reads it."""
    reward: Reward = field(default_factory=Reward)
    """Scores the answers."""
    policy_loss: PolicyLoss = field(default_factory=grpo_loss)
    """The actor's loss."""
    group_size: int = 8
    """Answers to each prompt."""
    baseline: Baseline = "mean"
    """What an answer's score is compared with."""
    scale: Literal["std", "none"] = "std"
    """Divide a group's advantages by its standard deviation, or leave them (Dr.GRPO)."""
    reward_kl_coef: float = 0.0
    """Weight of an answer's divergence from the reference in its score; GRPO has it in the loss instead."""
    mask_truncated: bool = False
    """Learn nothing from answers that were cut off (DAPO's overlong filtering); groups still count them."""
    epochs: int = 1
    """Passes over each batch."""
    mini_batch_size: int = 0
    """Rows (answers) per optimizer step; 0 is the whole batch."""

    def __post_init__(self) -> None:
        """Refuse groups whose answers cannot differ: of one answer, or of greedy ones."""
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size}: an answer is compared with others to its prompt. Try 8."
            )
        self.refuse_greedy(f"group_size={self.group_size}")

    def step(self, batch: Batch) -> Metrics:
        """One iteration."""
        batch = self.answers_to(batch, self.group_size)
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reward.compute_reward(batch)
        if "reference" not in self.uncalled():
            batch |= self.reference.compute_ref_log_prob(batch)
        batch, metrics = self.compute_advantage(batch)
        for mini in self.mini_batches(batch, size=self.mini_batch_size, epochs=self.epochs):
            metrics |= self.actor.update_actor(mini, loss=self.policy_loss)
        return metrics

    def uncalled(self) -> tuple[str, ...]:
        """A reference that neither the estimator nor the loss reads."""
        return () if reads_reference(self.estimator(), self.policy_loss) else ("reference",)

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Add `advantages` [B, R] float32: each answer's distance from its group."""
        batch = self.estimate(batch, self.estimator())
        metrics = Metrics.of(self.rollout_metrics(batch))
        if self.mask_truncated:
            mask = batch["response_mask"] & ~batch["truncated_mask"]
            batch |= {"response_mask": mask, "row_ends": row_ends(mask)}
        return batch, metrics

    def estimator(self) -> GroupEstimator:
        """What makes the advantages of a batch of groups."""
        return GroupEstimator(
            group_size=self.group_size,
            baseline=self.baseline,
            scale=self.scale,
            kl_coef=self.reward_kl_coef,
        )
