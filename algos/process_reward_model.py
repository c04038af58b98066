"""ProcessRewardModel: a number for each step of an answer, learned from labelled steps (Lightman 2023)."""

from __future__ import annotations

from dataclasses import field

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import StepLoss
from rlhf_lightning.workers import Scorer


class ProcessRewardModel(RLHFAlgorithm):
    """Lightman 2023: each step right or wrong, said at its last token. Needs steps, such as StepData."""

    needs = ("response_ids", "step_mask", "step_labels")
    progress = ("process_reward/loss", "process_reward/accuracy")

    reward: Scorer = field(default_factory=Scorer)
    """The model that learns to judge steps."""
    loss: StepLoss = field(default_factory=StepLoss)
    """What it minimises."""
    mini_batch_size: int = 0
    """Rows per optimizer step; 0 is the whole batch."""

    def step(self, batch: Batch) -> Metrics:
        """One pass over a batch of labelled answers."""
        metrics = Metrics()
        for mini in self.mini_batches(batch, size=self.mini_batch_size):
            metrics |= self.reward.update_scorer(mini, loss=self.loss)
        return metrics

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        """Log loss and accuracy on held-out steps."""
        rows = Batch.of(batch)
        metrics = self.reward.compute_loss(rows, loss=self.loss)
        self.log_held_out(metrics, rows, counted="step_mask")
