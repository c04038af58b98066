"""GRPO: advantages from a group of answers to the same prompt, no critic (Shao 2024, DeepSeekMath)."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

import torch

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import PolicyLoss, group_advantages, rollout_metrics, spread
from rlhf_lightning.workers import Actor, Reference, Reward


def grpo_loss() -> PolicyLoss:
    """The clipped surrogate as a mean over rows of means over tokens, with the KL term in the loss."""
    return PolicyLoss(aggregation="seq-mean-token-mean", kl_coef=0.001)


class GRPO(RLHFAlgorithm):
    """DeepSeekMath eq. 3; Dr.GRPO with `scale=none` and `policy_loss.aggregation=seq-mean-token-sum-norm`."""

    actor: Actor = field(default_factory=Actor)
    """Answers, and learns to answer better."""
    reference: Reference = field(default_factory=Reference)
    """What the actor is kept close to; computed only where the loss has a KL term."""
    reward: Reward = field(default_factory=Reward)
    """Scores the answers."""
    policy_loss: PolicyLoss = field(default_factory=grpo_loss)
    """The actor's loss."""
    group_size: int = 8
    """Answers to each prompt."""
    scale: Literal["std", "none"] = "std"
    """Divide a group's advantages by its standard deviation, or leave them (Dr.GRPO)."""
    epochs: int = 1
    """Passes over each batch."""
    mini_batch_size: int = 0
    """Rows (answers) per optimizer step; 0 is the whole batch."""

    def step(self, batch: Batch) -> Metrics:
        """One iteration."""
        batch = self.group(batch)
        batch |= self.actor.generate_sequences(batch)
        if self.policy_loss.kl_coef:
            batch |= self.reference.compute_ref_log_prob(batch)
        batch |= self.reward.compute_reward(batch)
        batch, metrics = self.compute_advantage(batch)
        for mini in self.mini_batches(batch, size=self.mini_batch_size, epochs=self.epochs):
            metrics |= self.actor.update_actor(mini, loss=self.policy_loss)
        return metrics

    def group(self, batch: Batch) -> Batch:
        """Each prompt `group_size` times, side by side, each copy with a row id of its own."""
        copies = torch.arange(self.group_size).repeat(len(batch))
        grouped = batch.repeat(self.group_size)
        return grouped | Batch.of({"row_ids": grouped["row_ids"] * self.group_size + copies})

    def compute_advantage(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Add `advantages` [B, R] float32: each answer's distance from its group's mean."""
        mask, scores = batch["response_mask"], batch["scores"]
        groups = torch.arange(len(batch)) // self.group_size
        advantages = group_advantages(scores.sum(dim=1), groups, valid=mask.any(dim=1), scale=self.scale)
        metrics = rollout_metrics(scores, mask) | {"response/samples_per_prompt": float(self.group_size)}
        return batch | Batch.of({"advantages": spread(advantages, mask)}), Metrics.of(metrics)
