"""OnlineDPO: DPO on the better and the worse of two answers that the actor has just given (Guo 2024)."""

from __future__ import annotations

from dataclasses import field

import torch

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import DPOLoss, row_totals
from rlhf_lightning.workers import Actor, Reference, Reward


class OnlineDPO(RLHFAlgorithm):
    """Guo 2024, algorithm 1, with a reward instead of a judge."""

    actor: Actor = field(default_factory=Actor)
    """Answers, and learns to answer better."""
    reference: Reference = field(default_factory=Reference)
    """What its preference is measured from."""
    reward: Reward = field(default_factory=Reward)
    """Says which of two answers is the better one."""
    loss: DPOLoss = field(default_factory=DPOLoss)
    """What the actor minimises."""
    epochs: int = 1
    """Passes over each batch."""
    mini_batch_size: int = 0
    """Pairs per optimizer step; 0 is the whole batch."""

    def __post_init__(self) -> None:
        """Refuse an actor that answers a prompt the same way twice."""
        self.refuse_greedy("OnlineDPO compares two answers")

    def step(self, batch: Batch) -> Metrics:
        """One iteration."""
        batch = self.answers_to(batch, 2)
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reward.compute_reward(batch)
        pairs, metrics = self.pair(batch)
        pairs |= self.reference.compute_ref_log_prob(pairs)
        for mini in self.mini_batches(pairs, size=self.mini_batch_size, epochs=self.epochs, together=2):
            metrics |= self.actor.update_actor(mini, loss=self.loss)
        return metrics

    def pair(self, batch: Batch) -> tuple[Batch, Metrics]:
        """The better answer before the worse one; pairs without a better one are left out."""
        batch |= row_totals(batch["scores"], batch["response_mask"])
        pairs = torch.arange(len(batch)).view(-1, 2)
        first, second = batch["row_scores"].view(-1, 2).unbind(dim=1)
        ordered = torch.where((second > first)[:, None], pairs.flip(dims=(1,)), pairs)
        differs = first != second
        kept = ordered[differs].flatten()
        found = self.rollout_metrics(batch) | {"response/ties": 1 - float(differs.float().mean())}
        return batch.take(kept.numpy()), Metrics.of(found)
