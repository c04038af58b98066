"""DPO: direct preference optimisation, a policy learned from pairs without a reward model (Rafailov 2023)."""

from __future__ import annotations

from dataclasses import field

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import DPOLoss
from rlhf_lightning.workers import Actor, Reference


class DPO(RLHFAlgorithm):
    """Rafailov 2023 eq. 7; IPO, hinge and label smoothing by `loss`. Needs pairs, such as PreferenceData."""

    needs = ("response_ids",)
    validates = ("reference",)
    progress = ("dpo/loss", "dpo/accuracy")

    actor: Actor = field(default_factory=Actor)
    """The model that learns to prefer."""
    reference: Reference = field(default_factory=Reference)
    """What its preference is measured from."""
    loss: DPOLoss = field(default_factory=DPOLoss)
    """What it minimises."""
    mini_batch_size: int = 0
    """Pairs per optimizer step; 0 is the whole batch."""

    def step(self, batch: Batch) -> Metrics:
        """One pass over a batch of pairs: rows chosen, rejected, chosen, rejected, ..."""
        metrics = Metrics()
        for mini in self.mini_batches(batch, size=self.mini_batch_size, together=2):
            scored = mini | self.reference.compute_ref_log_prob(mini)
            metrics |= self.actor.update_actor(scored, loss=self.loss)
        return metrics

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        """Log loss, accuracy and margin on held-out pairs."""
        rows = Batch.of(batch)
        rows |= self.reference.compute_ref_log_prob(rows)
        chosen = self.loss.count({"response_mask": rows["response_mask"]})
        self.log_held_out(self.actor.compute_loss(rows, loss=self.loss), rows, sft_loss=chosen.tokens)
