"""Distillation: a student learns to say what a teacher would say (Agarwal 2023, GKD)."""

from __future__ import annotations

from dataclasses import field

from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data_checks import check_imitable
from rlhf_lightning.engines import num_tokens
from rlhf_lightning.functional import DistillationLoss
from rlhf_lightning.workers import Actor, Reference, Reward


class Distillation(RLHFAlgorithm):
    """Agarwal 2023, algorithm 1, on the words that the teacher finds likeliest in each place."""

    progress = ("distillation/loss",)
    words = 0
    """The words that both models have; `setup` sets it."""

    actor: Actor = field(default_factory=Actor)
    """The student."""
    teacher: Reference = field(default_factory=Reference)
    """Any model with the student's tokenizer, or with `decay` the student's own average; it reads at its
    temperature."""
    reward: Reward = field(default_factory=Reward)
    """Scores held-out answers; nothing else is scored."""
    loss: DistillationLoss = field(default_factory=DistillationLoss)
    """What the student minimises."""
    candidates: int = 64
    """Words of each place that are told apart; memory grows with them."""
    given: float = 0.0
    """Share of the iterations that learn from the data's answers, instead of the student's own."""
    mini_batch_size: int = 0
    """Answers per optimizer step; 0 is the whole batch."""

    def __post_init__(self) -> None:
        """Declare what the options need of the data and of a validation.

        Raises:
            ValueError: there are no candidates, or `given` is no share.
        """
        if self.candidates < 1:
            raise ValueError(f"candidates={self.candidates}: are words to compare. Try 64.")
        if not 0 <= self.given <= 1:
            raise ValueError(f"given={self.given}: is a share of the iterations. Try 0.5.")
        self.needs = ("response_ids",) if self.given else ()
        self.draws = self.given < 1
        self.validates = ("reward",) if self.draws else ("teacher",)

    def uncalled(self) -> tuple[str, ...]:
        """The reward: nothing is scored but held-out answers."""
        return ("reward",)

    def setup(self, stage: str) -> None:
        """As for every algorithm; also refuse a run without a teacher, and bad answers.

        Raises:
            ValueError: there is no teacher, it has fewer words than `candidates`, or some answers are bad.
        """
        taught = self.teacher.path or self.teacher.decay is not None
        if not taught and (stage == "fit" or (stage == "validate" and not self.draws)):
            raise ValueError(
                "teacher.path: there is no teacher. Type --algo.teacher.path DIRECTORY, or "
                "--algo.teacher.decay 0.99 for the actor's own average."
            )
        if self.given:
            check_imitable(self, stage)
        super().setup(stage)
        known = filter(None, map(num_tokens, (self.actor, self.teacher)))
        self.words = min(known, default=0)
        if 0 < self.words < self.candidates:
            raise ValueError(
                f"candidates={self.candidates}: the models have {self.words} words. "
                f"Try {min(64, self.words)}."
            )

    def step(self, batch: Batch) -> Metrics:
        """One iteration."""
        drawn = not self.reads(self.global_step)
        if drawn:
            batch |= self.actor.generate_sequences(batch)
        batch = self.taught(batch)
        metrics = Metrics.of(self.rollout_metrics(batch) if drawn else {})
        for mini in self.mini_batches(batch, size=self.mini_batch_size):
            metrics |= self.actor.update_actor(mini, loss=self.loss)
        return metrics

    def reads(self, iteration: int) -> bool:
        """Whether this iteration, counted from 0, learns from given answers; they are spread evenly."""
        return int((iteration + 1) * self.given) > int(iteration * self.given)

    def taught(self, batch: Batch) -> Batch:
        """The batch with what the teacher says of it."""
        return batch | self.teacher.compute_ref_candidates(batch, size=self.candidates, among=self.words)

    def validation_step(self, batch: Columns, batch_idx: int) -> dict[str, list[object]] | None:
        """Score answers to held-out prompts; without answers of its own, log the loss on held-out rows."""
        if self.draws:
            return super().validation_step(batch, batch_idx)
        rows = Batch.of(batch)
        own = {} if self.loss.aggregation == "token-mean" else {"loss": len(rows)}
        metrics = self.actor.compute_loss(self.taught(rows), loss=self.loss)
        self.log_held_out(metrics, rows, counted="response_mask", **own)
        return None
