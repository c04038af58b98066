"""CostModel: how harmful an answer is, learned from pairs and from safe or not (Dai 2023, Safe RLHF)."""

from __future__ import annotations

from dataclasses import field

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import CostLoss
from rlhf_lightning.workers import Scorer


class CostModel(RLHFAlgorithm):
    """Dai 2023 eq. 6: the rejected answer costs more, and a harmful one costs more than 0.

    Needs pairs with `safe`, such as PreferenceData with `safe_fields`.
    """

    needs = ("response_ids", "safe")
    progress = ("cost_model/loss", "cost_model/accuracy")

    cost: Scorer = field(default_factory=Scorer)
    """The model that learns to count the cost."""
    loss: CostLoss = field(default_factory=CostLoss)
    """What it minimises."""
    mini_batch_size: int = 0
    """Pairs per optimizer step; 0 is the whole batch."""

    def step(self, batch: Batch) -> Metrics:
        """One pass over a batch of pairs: rows chosen, rejected, chosen, rejected, ..."""
        metrics = Metrics()
        for mini in self.mini_batches(batch, size=self.mini_batch_size, together=2):
            metrics |= self.cost.update_scorer(mini, loss=self.loss)
        return metrics

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        """Log loss and accuracies on held-out pairs."""
        rows = Batch.of(batch)
        self.log_held_out(self.cost.compute_loss(rows, loss=self.loss), rows)
