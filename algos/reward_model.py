"""RewardModel: a number for an answer, learned from pairs (Bradley and Terry 1952; Ouyang 2022 eq. 1)."""

from __future__ import annotations

from dataclasses import field

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import PairwiseLoss
from rlhf_lightning.workers import Scorer


class RewardModel(RLHFAlgorithm):
    """The chosen answer's score above the rejected one's. Needs pairs, such as PreferenceData.

    `rlhf export CHECKPOINT OUT` writes the directory that `--algo.reward.path` and `--algo.critic.path` take.
    """

    needs = ("response_ids",)
    progress = ("reward_model/loss", "reward_model/accuracy")

    reward: Scorer = field(default_factory=Scorer)
    """The model that learns to score."""
    loss: PairwiseLoss = field(default_factory=PairwiseLoss)
    """What it minimises."""
    mini_batch_size: int = 0
    """Pairs per optimizer step; 0 is the whole batch."""

    def step(self, batch: Batch) -> Metrics:
        """One pass over a batch of pairs: rows chosen, rejected, chosen, rejected, ..."""
        metrics = Metrics()
        for mini in self.mini_batches(batch, size=self.mini_batch_size, together=2):
            metrics |= self.reward.update_scorer(mini, loss=self.loss)
        return metrics

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        """Log loss, accuracy and margin on held-out pairs."""
        rows = Batch.of(batch)
        self.log_held_out(self.reward.compute_loss(rows, loss=self.loss), rows)
