"""Steps of one's own with a reward model that learns within them."""

from __future__ import annotations

from dataclasses import field

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import PairwiseLoss
from rlhf_lightning.spec import Sampling
from rlhf_lightning.workers import Actor, Scorer
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
