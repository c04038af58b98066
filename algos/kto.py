"""KTO: learning from answers that are good or bad each on its own, not in pairs (Ethayarajh 2024)."""

from __future__ import annotations

from dataclasses import field

import torch

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.balance import balanced
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import row_data
from rlhf_lightning.engines import max_positions
from rlhf_lightning.functional import KTOLoss, kto_baseline, of_other_prompts
from rlhf_lightning.workers import Actor, Reference


class KTO(RLHFAlgorithm):
    """Ethayarajh 2024, section 4. Needs `labels`, such as UnpairedData gives.

    The baseline z0 is the divergence from the reference on mismatched rows, each prompt with the answer to
    another one, over the whole mini-batch; nothing is learned from it.
    """

    needs = ("response_ids", "labels")
    validates = ("reference",)
    progress = ("kto/loss",)

    actor: Actor = field(default_factory=Actor)
    """The model that learns."""
    reference: Reference = field(default_factory=Reference)
    """What an answer's worth is measured from."""
    loss: KTOLoss = field(default_factory=KTOLoss)
    """What it minimises."""
    mini_batch_size: int = 0
    """Rows per optimizer step, at least 2; 0 is the whole batch."""

    def __post_init__(self) -> None:
        """Refuse mini-batches of one row, where the baseline needs answers to other prompts."""
        self.positions: int | None = None
        if self.mini_batch_size == 1 and self.loss.baseline:
            raise ValueError(
                "mini_batch_size=1: KTO compares with answers to other prompts. Try 0, the whole batch."
            )

    def setup(self, stage: str) -> None:
        """As for every algorithm; also refuse batches of one prompt, and learn how long rows may be.

        Raises:
            ValueError: a batch has no more rows than one prompt may have, and the baseline needs others.
        """
        super().setup(stage)
        data, compares = row_data(self.trainer), self.loss.baseline and stage != "predict"
        if compares and data is not None and data.batch_size <= data.rows_per_prompt:
            raise ValueError(
                f"{data.typed}.batch_size={data.batch_size}: KTO compares with answers to other prompts, and "
                "the rows of one prompt may fill a batch. Try 16, or --algo.loss.baseline false."
            )
        known = filter(None, map(max_positions, (self.actor, self.reference)))
        self.positions = min(known, default=None)

    def step(self, batch: Batch) -> Metrics:
        """One pass over a batch of labelled answers."""
        metrics = Metrics()
        for mini in self.mini_batches(batch, size=self.mini_batch_size):
            scored = mini | self.reference.compute_ref_log_prob(mini)
            metrics |= self.actor.update_actor(scored | self.baseline(mini), loss=self.loss)
        return metrics

    def baseline(self, batch: Batch) -> Batch:
        """The column `kl_baseline` [B] float32: z0, the same in every row; no column where none is read."""
        if not self.loss.baseline:
            return Batch({}, num_rows=len(batch))
        others = of_other_prompts(batch["prompt_ids"], batch["prompt_mask"])
        if others is None:  # such as the last row of an epoch, alone
            return Batch.of({"kl_baseline": torch.zeros(len(batch))})
        answers = batch.select(("response_ids", "response_mask")).take(others.numpy())
        mismatched = batch.select(("prompt_ids", "prompt_mask")) | answers
        if self.positions is not None:  # a long answer to a long prompt is cut
            room = self.positions - batch["prompt_mask"].sum(dim=1, keepdim=True)
            mask = answers["response_mask"] & (torch.arange(answers["response_mask"].shape[1]) < room)
            mismatched |= {"response_mask": mask}
        mismatched = balanced(mismatched)
        mismatched |= self.reference.compute_ref_log_prob(mismatched)
        mismatched |= self.actor.read_log_prob(mismatched)
        found = (mismatched[name] for name in ("log_probs", "ref_log_probs", "response_mask"))
        return Batch.of({"kl_baseline": torch.full((len(batch),), float(kto_baseline(*found)))})

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        """Log the loss on held-out rows."""
        rows = Batch.of(batch)
        rows |= self.reference.compute_ref_log_prob(rows)
        metrics = self.actor.compute_loss(rows | self.baseline(rows), loss=self.loss)
        counts = self.loss.count({name: rows[name] for name in ("response_mask", "labels")})
        good, bad = counts.groups, counts.sequences - counts.groups
        self.log_held_out(metrics, rows, desirable_reward=good, undesirable_reward=bad, margin=0)

    def on_validation_epoch_end(self) -> None:
        """Log the margin between all held-out rows of the two labels."""
        found = self.trainer.callback_metrics
        names = ("val/desirable_reward", "val/undesirable_reward")
        if all(name in found for name in names):
            self.log("val/margin", found[names[0]] - found[names[1]])
