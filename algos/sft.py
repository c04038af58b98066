"""SFT: supervised fine-tuning on given responses; where every aligned model begins."""

from __future__ import annotations

from dataclasses import field

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data_checks import check_imitable
from rlhf_lightning.functional import SFTLoss
from rlhf_lightning.spec import OptimizerSpec
from rlhf_lightning.workers import Actor


class SFT(RLHFAlgorithm):
    """Cross-entropy on the data's responses; needs a data module that yields them, such as CompletionData."""

    needs = ("response_ids",)
    progress = ("sft/loss",)

    actor: Actor = field(default_factory=lambda: Actor(optimizer=OptimizerSpec(lr=1e-5)))
    """The model that learns."""
    loss: SFTLoss = field(default_factory=SFTLoss)
    """What it minimises."""
    mini_batch_size: int = 0
    """Rows per optimizer step; 0 is the whole batch."""

    def setup(self, stage: str) -> None:
        """As for every algorithm; also refuse data in which some answers are bad.

        Raises:
            ValueError: the data gives pairs or labelled answers, or the loss has no weight.
        """
        check_imitable(self, stage)
        if not self.loss.coef and stage == "fit":
            raise ValueError("loss.coef=0.0: nothing would be learned. Try 1.0.")
        super().setup(stage)

    def step(self, batch: Batch) -> Metrics:
        """One pass over a batch."""
        metrics = Metrics()
        for mini in self.mini_batches(batch, size=self.mini_batch_size):
            metrics |= self.actor.update_actor(mini, loss=self.loss)
        return metrics

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        """Log the loss on held-out rows."""
        rows = Batch.of(batch)
        metrics = self.actor.compute_loss(rows, loss=self.loss)
        own = {} if self.loss.aggregation == "token-mean" else {"loss": len(rows)}
        self.log_held_out(metrics, rows, counted="response_mask", **own)
