"""Steps of one's own that do what no algorithm of the package does."""

from __future__ import annotations

import json
from dataclasses import field
from pathlib import Path

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.callbacks import Rollouts
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import PolicyLoss
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reward
from tests.unit.algos.short import trainer
from tests.unit.algos.small import run


def actor(path: str) -> Actor:
    return Actor(path=path, sampling=Sampling(max_new_tokens=6))


def data() -> TaskData:
    return TaskData(batch_size=4, num_rows=8, num_val_rows=0)


class Curriculum(RLHFAlgorithm):
    """Every other iteration finds no prompt hard enough."""

    actor: Actor = field(default_factory=Actor)
    reward: Reward = field(default_factory=Reward)

    def step(self, batch: Batch) -> Metrics:
        """Answer what is left."""
        batch = self.answers_to(batch.take(range(4 if self.global_step % 2 else 0)), 2)
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reward.compute_reward(batch)
        metrics = Metrics.of(self.rollout_metrics(batch))
        batch |= {"advantages": batch["scores"]}
        return metrics | self.actor.update_actor(batch, loss=PolicyLoss())


def test_an_iteration_in_which_every_prompt_is_dropped(model: str) -> None:
    none, some = run(Curriculum(actor=actor(model)), data(), steps=2).numbers
    assert not [name for name in none if name.startswith(("reward/", "response/", "actor/"))]
    assert some["response/tokens"] > 0
    assert some["actor/grad_norm"] >= 0


class Imitation(RLHFAlgorithm):
    """Learns from its own answers, which nothing scores."""

    actor: Actor = field(default_factory=Actor)

    def step(self, batch: Batch) -> Metrics:
        """Answer, and tell of it."""
        batch |= self.actor.generate_sequences(batch)
        return Metrics.of(self.rollout_metrics(batch))


def test_answers_that_nothing_scores(model: str, tmp_path: Path) -> None:
    fit = trainer(Local(), tmp_path, steps=1, callbacks=[Rollouts()])
    fit.fit(Imitation(actor=actor(model)), datamodule=data())
    assert {name for name in fit.logged_metrics if name.startswith(("reward/", "response/"))} == {
        f"response/{name}" for name in ("tokens", "length_mean", "length_max", "truncated")
    }
    (file,) = (tmp_path / "rollouts").iterdir()
    assert set(json.loads(file.read_text().splitlines()[0])) == {"step", "row_id", "prompt", "response"}
