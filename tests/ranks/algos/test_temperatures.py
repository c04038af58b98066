"""Calls that read responses at another temperature than the actor draws with."""

from __future__ import annotations

from dataclasses import field

import pytest
import torch

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics, WorkerError
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import FSDP
from rlhf_lightning.functional import SFTLoss
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.workers import Actor, Settings
from tests.unit.algos.small import Keep, run


class Imitation(RLHFAlgorithm):
    """Learns from given answers, beside which it draws."""

    needs = ("response_ids",)
    draws = True

    actor: Actor = field(default_factory=Actor)
    told: float | None = None

    def step(self, batch: Batch) -> Metrics:
        """Read the answers in every way, and learn from them."""
        read = self.actor.read_log_prob(batch, temperature=self.told)["log_probs"]
        scored = self.actor.compute_log_prob(batch, temperature=self.told)
        numbers = {
            "mine/apart": float((read - scored["log_probs"]).abs().max()),
            "mine/entropy": float(scored["entropy"].sum()),
            "mine/said": float(read.sum()),
        }
        held = self.actor.compute_loss(batch, loss=SFTLoss(), temperature=self.told)
        self.actor.compute_log_prob(batch)  # an engine that keeps passes has kept these, of other numbers
        return Metrics.of(numbers) | held.moved("sft", to="held") | self.learn(batch)

    def learn(self, batch: Batch) -> Metrics:
        return self.actor.update_actor(batch, loss=SFTLoss(), temperature=self.told)


class BestOfN(Imitation):
    """Learns from answers that it has drawn, whose generation may have been recorded."""

    def step(self, batch: Batch) -> Metrics:
        prompts = batch.select(["prompt_ids", "prompt_mask", "row_ids"])
        drawn = prompts | self.actor.generate_sequences(prompts)
        held = self.actor.compute_loss(drawn, loss=SFTLoss(), temperature=self.told)
        return held.moved("sft", to="held") | self.learn(drawn)


def learned(
    kind: type[Imitation], path: str, *, heat: float, told: float | None = None, keep: int = 0
) -> Keep:
    sampling = Sampling(max_new_tokens=6, temperature=heat)
    actor = Actor(path=path, sampling=sampling, optimizer=OptimizerSpec(lr=1e-2))
    rows = TaskData(batch_size=4, num_rows=8, num_val_rows=0, completions=True)
    settings = Settings(train=FSDP(kept_tokens=keep))
    return run(kind(actor=actor, told=told), rows, steps=1, settings=settings)


NAMES = ("mine/entropy", "mine/said", "held/nll", "sft/nll", "actor/grad_norm")


@pytest.mark.parametrize("keep", [0, 10_000])
def test_responses_are_read_at_the_temperature_that_a_call_was_told(model: str, keep: int) -> None:
    told, plain, warm = (
        learned(Imitation, model, heat=heat, told=other, keep=keep)
        for heat, other in ((0.2, 1.0), (1.0, None), (0.2, None))
    )
    for name in NAMES:
        assert told.numbers[0][name] == pytest.approx(plain.numbers[0][name], rel=1e-5), name
        assert told.numbers[0][name] != pytest.approx(warm.numbers[0][name], rel=1e-3), name
    for kept in (told, plain, warm):
        assert kept.numbers[0]["mine/apart"] < 1e-5
        assert kept.numbers[0]["sft/nll"] == pytest.approx(kept.numbers[0]["held/nll"], rel=1e-5)
    # Adam's first step is of the size of the rate, whatever the gradient's, so rounding of small ones shows.
    torch.testing.assert_close(told.weights["actor"], plain.weights["actor"], atol=1e-3, rtol=0)


@pytest.mark.parametrize("keep", [0, 10_000])
def test_drawn_answers_are_imitated_at_another_temperature_than_they_were_drawn_at(
    model: str, keep: int
) -> None:
    cold, warm = (learned(BestOfN, model, heat=0.2, told=told, keep=keep).numbers[0] for told in (1.0, None))
    for numbers in (cold, warm):
        assert numbers["sft/nll"] == pytest.approx(numbers["held/nll"], rel=1e-5)
    assert cold["sft/nll"] != pytest.approx(warm["sft/nll"], rel=1e-3)


def test_a_negative_temperature_is_refused(model: str) -> None:
    with pytest.raises(WorkerError, match=r"temperature=-1\.0: use 0 for greedy"):
        learned(Imitation, model, heat=1.0, told=-1.0)
