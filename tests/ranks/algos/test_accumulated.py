"""Gradients that steps of one's own add up before an update takes them."""

from __future__ import annotations

from dataclasses import field

import pytest
import torch

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import PPO
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.functional import PolicyLoss, SFTLoss
from rlhf_lightning.workers import Actor, Reward
from tests.ranks.algos.test_own_steps import Imitation, actor, data
from tests.unit.algos.small import run


class InTwoParts(RLHFAlgorithm):
    """Learns from the halves of a batch, in one optimizer step."""

    actor: Actor = field(default_factory=Actor)

    def step(self, batch: Batch) -> Metrics:
        """Answer, and learn that all of it was good."""
        batch |= self.actor.generate_sequences(batch)
        first, second = (batch | {"advantages": batch["response_mask"].float()}).split(2)
        metrics = self.actor.accumulate_actor(first, loss=PolicyLoss()).moved("actor", to="first")
        return metrics | self.actor.update_actor(second, loss=PolicyLoss())


def test_what_is_accumulated_is_read_at_the_temperature_of_its_draws(model: str) -> None:
    kept = run(InTwoParts(actor=actor(model, temperature=0.3)), data(), steps=1)
    numbers = kept.numbers[0]
    for part in ("first", "actor"):
        assert numbers[f"{part}/approx_kl"] == pytest.approx(0, abs=1e-6), "no weight has changed"
        assert numbers[f"{part}/loss"] == pytest.approx(-1, abs=1e-5), "every ratio is 1"
    assert numbers["actor/skipped_steps"] == 0
    assert numbers["actor/grad_norm"] > 0


class Accumulated(Imitation):
    """Learns from the data's answers, in an update that is given all rows, or none after all."""

    needs = ("response_ids",)
    left: bool = False

    def step(self, batch: Batch) -> Metrics:
        if not self.left:
            return self.actor.update_actor(batch, loss=SFTLoss())
        metrics = self.actor.accumulate_actor(batch, loss=SFTLoss())
        return metrics | self.actor.update_actor(batch.take([]), loss=SFTLoss())


def test_an_update_of_no_rows_steps_with_the_gradient_that_was_left(model: str) -> None:
    at_once, left = (
        run(Accumulated(actor=actor(model), left=left), data(completions=True), steps=1)
        for left in (False, True)
    )
    assert left.numbers[0]["sft/nll"] == pytest.approx(at_once.numbers[0]["sft/nll"])
    assert left.numbers[0]["actor/grad_norm"] == pytest.approx(at_once.numbers[0]["actor/grad_norm"])
    torch.testing.assert_close(left.weights["actor"], at_once.weights["actor"])


class Positive(PPO):
    """Adds a loss on given rows to the actor's steps, also to those that PPO leaves out."""

    def update_actor(self, mini: Batch) -> Metrics:
        metrics = self.actor.accumulate_actor(mini, loss=SFTLoss())
        return metrics | super().update_actor(mini)


def test_a_gradient_that_no_update_takes_ends_the_run(model: str) -> None:
    """It went into the first step after the critic's warm-up, without a word."""
    reward = Reward(functions={"length": 1.0})
    kept = run(Positive(actor=actor(model), reward=reward), data(), steps=2)
    assert kept.numbers[1]["actor/grad_norm"] > 0
    with pytest.raises(ValueError, match="actor: the iteration ends with a gradient that was accumulated"):
        run(Positive(actor=actor(model), reward=reward, critic_warmup_steps=1), data(), steps=2)
