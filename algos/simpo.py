"""SimPO: preference optimisation on length-normalised log-probabilities, without a reference (Meng 2024)."""

from __future__ import annotations

from dataclasses import field

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import SimPOLoss
from rlhf_lightning.workers import Actor


class SimPO(RLHFAlgorithm):
    """Meng 2024 eq. 6; DPO minus the reference. Needs pairs, such as PreferenceData."""

    needs = ("response_ids",)
    progress = ("simpo/loss", "simpo/accuracy")

    actor: Actor = field(default_factory=Actor)
    """The model that learns to prefer."""
    loss: SimPOLoss = field(default_factory=SimPOLoss)
    """What it minimises."""
    mini_batch_size: int = 0
    """Pairs per optimizer step; 0 is the whole batch."""

    def step(self, batch: Batch) -> Metrics:
        """One pass over a batch of pairs: rows chosen, rejected, chosen, rejected, ..."""
        metrics = Metrics()
        for mini in self.mini_batches(batch, size=self.mini_batch_size, together=2):
            metrics |= self.actor.update_actor(mini, loss=self.loss)
        return metrics

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        """Log loss, accuracy and margin on held-out pairs."""
        rows = Batch.of(batch)
        chosen = self.loss.count({"response_mask": rows["response_mask"]})
        self.log_held_out(self.actor.compute_loss(rows, loss=self.loss), rows, sft_loss=chosen.tokens)
