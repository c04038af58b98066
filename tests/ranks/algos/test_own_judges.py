"""Steps of one's own that read, and measure, what judges and critics learn within them."""

from __future__ import annotations

from dataclasses import field

import pytest
import torch

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import PairwiseLoss, ValueLoss, at_last_valid
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.workers import Actor, Critic, Scorer
from tests.unit.algos.small import run


def actor(path: str) -> Actor:
    return Actor(path=path, sampling=Sampling(max_new_tokens=6))


class Measured(RLHFAlgorithm):
    """Has pairs of answers judged, of which the first iteration has found none."""

    actor: Actor = field(default_factory=Actor)
    judge: Scorer = field(default_factory=lambda: Scorer(path=""))

    def step(self, batch: Batch) -> Metrics:
        """Answer, and ask how well the judge orders the pairs."""
        batch = self.answers_to(batch, 2)
        batch |= self.actor.generate_sequences(batch)
        pairs = batch.take(range(len(batch) if self.global_step else 0))
        return self.judge.compute_loss(pairs, loss=PairwiseLoss())


def test_a_loss_of_no_rows_is_not_logged(model: str) -> None:
    """It was logged as 0, and the accuracy too."""
    none, some = run(Measured(actor=actor(model)), TaskData(batch_size=2, num_rows=4, num_val_rows=0)).numbers
    assert some["reward_model/loss"] > 0
    assert 0 <= some["reward_model/accuracy"] <= 1
    assert not [name for name in none if name.startswith("reward_model/")]


class Followed(RLHFAlgorithm):
    """Has answers scored by a judge before and after it has learned from them."""

    actor: Actor = field(default_factory=Actor)
    judge: Scorer = field(default_factory=lambda: Scorer(path="", optimizer=OptimizerSpec(lr=1e-2)))

    def step(self, batch: Batch) -> Metrics:
        """Keep both scores in `scored`."""
        batch = self.answers_to(batch, 2)
        batch |= self.actor.generate_sequences(batch)
        first = self.judge.compute_scores(batch)
        metrics = self.judge.update_scorer(batch, loss=PairwiseLoss())
        self.scored = [first["scores"], self.judge.compute_scores(batch)["scores"]]
        self.mask = batch["response_mask"]
        return metrics


def test_a_reward_model_is_read_while_it_learns(model: str) -> None:
    algorithm = Followed(actor=actor(model))
    kept = run(algorithm, TaskData(batch_size=2, num_rows=4, num_val_rows=0), steps=1)
    margins = []
    for scores in algorithm.scored:
        torch.testing.assert_close(scores, at_last_valid(scores.sum(dim=1), algorithm.mask))
        margins.append(float((scores[0::2] - scores[1::2]).sum(dim=1).mean()))
    assert margins[0] == pytest.approx(kept.numbers[0]["reward_model/margin"], abs=1e-5), "that of the update"
    assert margins[1] > margins[0]


class Valued(RLHFAlgorithm):
    """Has a critic's loss measured before it learns."""

    actor: Actor = field(default_factory=Actor)
    critic: Critic = field(default_factory=Critic)

    def step(self, batch: Batch) -> Metrics:
        batch |= self.actor.generate_sequences(batch)
        batch |= self.critic.compute_values(batch)
        batch |= {"returns": batch["response_mask"].float()}
        measured = self.critic.compute_loss(batch, loss=ValueLoss()).moved("critic", to="held_out")
        return measured | self.critic.update_critic(batch, loss=ValueLoss())


def test_a_critics_loss_is_measured_without_learning(model: str) -> None:
    (numbers,) = run(
        Valued(actor=actor(model)), TaskData(batch_size=2, num_rows=4, num_val_rows=0), steps=1
    ).numbers
    assert numbers["held_out/loss"] > 0
    assert numbers["held_out/loss"] == pytest.approx(numbers["critic/loss"], rel=1e-5)
    assert "held_out/grad_norm" not in numbers
