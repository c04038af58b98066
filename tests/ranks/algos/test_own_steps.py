"""Steps of one's own that do what no algorithm of the package does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from examples import distillation
from examples.distillation import Distillation
from rlhf_lightning.algorithm import Columns, RLHFAlgorithm
from rlhf_lightning.algos import GRPO, SFT
from rlhf_lightning.callbacks import LastCheckpoint, Rollouts
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.functional import PolicyLoss, SFTLoss, masked_sum
from rlhf_lightning.reporting import answers, row_numbers
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local, OneStepOff
from rlhf_lightning.workers import Actor, Reference, Reward, joined
from tests.ranks.test_own_methods import run_documented
from tests.unit.algos.short import grpo, trainer
from tests.unit.algos.small import run


def actor(path: str, *, tokens: int = 6, temperature: float = 1.0) -> Actor:
    return Actor(path=path, sampling=Sampling(max_new_tokens=tokens, temperature=temperature))


def data(*, completions: bool = False) -> TaskData:
    return TaskData(batch_size=4, num_rows=8, num_val_rows=0, completions=completions)


class Curriculum(RLHFAlgorithm):
    """Every other iteration finds no prompt hard enough."""

    actor: Actor = field(default_factory=Actor)
    reward: Reward = field(default_factory=Reward)

    def step(self, batch: Batch) -> Metrics:
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


@dataclass(frozen=True, kw_only=True)
class Frozen(Actor):
    """Answers, and does not learn."""

    trains: ClassVar[bool] = False


class Collecting(Imitation):
    """Has answers written, from which nothing learns."""

    actor: Frozen = field(default_factory=Frozen)


def test_iterations_in_which_nothing_is_trained_count(model: str, tmp_path: Path) -> None:
    own = LastCheckpoint(tmp_path / "checkpoints")
    for steps, path in ((3, None), (4, own.path)):
        algorithm = Collecting(actor=Frozen(path=model, sampling=Sampling(max_new_tokens=6)))
        fit = trainer(Local(), tmp_path, steps=steps, enable_checkpointing=True, callbacks=[Rollouts(), own])
        fit.fit(algorithm, datamodule=data(), ckpt_path=path)
        assert fit.global_step == steps
        assert not list(own.path.glob("actor*"))
    written = [file.read_text().splitlines() for file in (tmp_path / "rollouts").iterdir()]
    steps_of = sorted(json.loads(line)["step"] for lines in written for line in lines)
    assert steps_of == [step for step in (1, 2, 3, 4) for _ in range(4)]


class Mixture(RLHFAlgorithm):
    """Answers of its own beside the data's."""

    needs = ("response_ids",)
    draws = True

    actor: Actor = field(default_factory=Actor)

    def step(self, batch: Batch) -> Metrics:
        """Read those of the data, and draw."""
        given = self.actor.compute_loss(batch, loss=SFTLoss())
        drawn = self.actor.generate_sequences(batch.select(["prompt_ids", "prompt_mask", "row_ids"]))
        own = batch | drawn
        ratio = self.actor.compute_log_prob(own)["log_probs"] - drawn["log_probs"]
        return given | Metrics.of({"mine/apart": float(ratio.abs().max()), "mine/longest": drawn_length(own)})


class Silent(Mixture):
    """The same, without saying that it draws."""

    draws = False


class Reader(SFT):
    """Learns from given answers, and takes the actor's likeliest, which are no draws."""

    def step(self, batch: Batch) -> Metrics:
        prompts = batch.select(["prompt_ids", "prompt_mask", "row_ids"])
        length = drawn_length(self.actor.generate_sequences(prompts, greedy=True))
        given = self.actor.compute_loss(batch, loss=SFTLoss())
        return given | Metrics.of({"mine/longest": length})


class Draws(Callback):
    """Has answers drawn between the steps."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        assert isinstance(pl_module, RLHFAlgorithm)
        rows = Batch.of(next(iter(cast("Iterable[Columns]", trainer.train_dataloader))))
        assert drawn_length(pl_module.main_actor.generate_sequences(rows)) > 0


def drawn_length(batch: Batch) -> float:
    return float(batch["response_mask"].sum(dim=1).max())


def test_who_draws_beside_given_answers_does_so_at_its_own_temperature(model: str) -> None:
    cold, warm, read = (
        run(kind(actor=actor(model, temperature=heat)), data(completions=True), steps=1).numbers[0]
        for kind, heat in ((Mixture, 0.3), (Mixture, 1.0), (Reader, 0.3))
    )
    assert cold["mine/apart"] < 1e-5
    assert cold["sft/nll"] != pytest.approx(warm["sft/nll"], rel=1e-3), "one policy, with one temperature"
    assert read["sft/nll"] == warm["sft/nll"], "an algorithm that only reads has temperature 1"


def test_who_draws_says_so(model: str, tmp_path: Path) -> None:
    said = r"^Silent\.step draws answers, .* temperature 1, whatever .* Write `draws = True` in the class"
    with pytest.raises(ValueError, match=said):
        run(Silent(actor=actor(model)), data(completions=True), steps=1)
    fit = trainer(Local(), tmp_path, steps=2, callbacks=[Draws()])
    fit.fit(Reader(actor=actor(model)), datamodule=data(completions=True))
    assert fit.global_step == 2


@pytest.mark.parametrize("told", ["max_new_tokens=600", "longest prompt and response"])
def test_both_kinds_of_answers_have_to_fit(model: str, told: str) -> None:
    rows = data(completions=True)
    if told.startswith("max"):
        mixture = Mixture(actor=actor(model, tokens=600))
    else:
        mixture, rows = Mixture(actor=actor(model)), long_answers()
    with pytest.raises(ValueError, match=told):
        run(mixture, rows, steps=1)


def long_answers() -> TaskData:
    """Given ones, for which the model has too few positions, to prompts for which it has enough."""
    rows = TaskData(batch_size=2, num_rows=2, num_val_rows=0, completions=True)
    rows.min_digits = rows.max_digits = 300
    return rows


def test_predict_reads_no_given_answers(model: str, tmp_path: Path) -> None:
    predict = trainer(Local(), tmp_path).predict(Mixture(actor=actor(model)), datamodule=long_answers())
    assert predict is not None
    assert len(predict) == 1


def test_answers_drawn_beside_given_ones_are_written(model: str, tmp_path: Path) -> None:
    fit = trainer(Local(), tmp_path, steps=1, callbacks=[Rollouts()])
    fit.fit(Mixture(actor=actor(model)), datamodule=data(completions=True))


def test_a_batch_ahead_it_needs_batches_of_one_size(model: str, tmp_path: Path) -> None:
    rows = TaskData(batch_size=3, num_rows=7, num_val_rows=0, completions=True)
    with pytest.raises(ValueError, match="7 rows ends with a batch of 1"):
        trainer(OneStepOff(), tmp_path, steps=3).fit(Mixture(actor=actor(model)), datamodule=rows)


class Couple(RLHFAlgorithm):
    """Two models of one class, which learn from the same answers."""

    actor: Actor = field(default_factory=Actor)
    second: Actor = field(default_factory=lambda: Actor(path=""))

    def step(self, batch: Batch) -> Metrics:
        batch |= self.actor.generate_sequences(batch)
        metrics = self.actor.update_actor(batch, loss=SFTLoss())
        return metrics | self.second.update_actor(batch, loss=SFTLoss())


def test_each_optimizer_reports_under_the_name_of_its_field(model: str) -> None:
    rates = (1e-2, 1e-3)
    first, second = (
        Actor(path=model, optimizer=OptimizerSpec(lr=lr), sampling=Sampling(max_new_tokens=6)) for lr in rates
    )
    kept = run(Couple(actor=first, second=second), data(), steps=1)
    (numbers,) = kept.numbers
    torch.testing.assert_close(kept.fresh["second"], kept.fresh["actor"], rtol=0, atol=0)
    assert (numbers["actor/lr"], numbers["second/lr"]) == pytest.approx(rates)
    assert numbers["actor/grad_norm"] > 0
    assert numbers["second/grad_norm"] > 0


class Unread(GRPO):
    """A validation and a prediction of one's own, which read nothing of what they ask for."""

    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        self.actor.generate_sequences(Batch.of(batch), greedy=True)

    def predict_step(self, batch: Columns, batch_idx: int) -> dict[str, list[object]]:
        self.actor.generate_sequences(Batch.of(batch), greedy=True)
        return {}


class Counting(Callback):
    """How often each method was called in each iteration."""

    def __init__(self) -> None:
        self.calls: list[Counter[str]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        assert isinstance(pl_module, RLHFAlgorithm)
        self.calls.append(Counter(report.method for report in pl_module.strategy.reports))


def test_the_calls_of_a_validation_are_no_iterations(tmp_path: Path) -> None:
    counting = Counting()
    fit = trainer(Local(), tmp_path, steps=2, limit_val_batches=2, val_check_interval=1, callbacks=[counting])
    fit.fit(grpo(Unread), datamodule=TaskData(batch_size=2, num_rows=4, num_val_rows=4))
    assert [calls["generate_sequences"] for calls in counting.calls] == [1, 1]


def test_calls_that_nothing_reads_are_waited_for(tmp_path: Path) -> None:
    rows = TaskData(batch_size=2, num_rows=4, num_val_rows=4)
    for fn in ("validate", "predict"):
        strategy = Local()
        run_of = getattr(trainer(strategy, tmp_path, limit_val_batches=None), fn)
        run_of(grpo(Unread), datamodule=rows)
        assert [report.method for report in strategy.reports] == ["generate_sequences"] * 2, fn


def test_nobody_is_taught_by_oneself(model: str) -> None:
    with pytest.raises(ValueError, match=r"no teacher\. Type --algo\.teacher\.path DIRECTORY\.$"):
        run(Distillation(actor=actor(model)), data(), steps=1)
    numbers = run(Distillation(actor=actor(model), teacher=Reference(path=model)), data(), steps=1).numbers
    assert numbers[0]["distillation/reverse_kl"] == pytest.approx(0, abs=1e-6), "one model, one opinion"


def test_a_teacher_learns_for_longer_than_an_epoch(model: str, tmp_path: Path) -> None:
    """The validation at the end is in another epoch; it was refused as never reached."""
    done = list[int]()

    def stop(run: Trainer, *_: object) -> None:
        done.append(run.global_step)
        run.should_stop = True

    distillation.fit(SFT(actor=actor(model)), tmp_path, 1000, LambdaCallback(on_train_batch_end=stop))
    assert done == [1]


class Vine(RLHFAlgorithm):
    """Continues its answers after two tokens and after four, as the documents say."""

    actor: Actor = field(default_factory=Actor)
    reward: Reward = field(default_factory=Reward)

    def step(self, batch: Batch) -> Metrics:
        """Run the recipe, and keep what it makes."""
        batch = self.answers_to(batch, 2)
        batch |= self.actor.generate_sequences(batch)
        names = {"self": self, "batch": batch, "joined": joined, "masked_sum": masked_sum}
        run_documented("def begun(", "states = joined(", names=names)
        self.made = {name: cast(Batch, names[name]) for name in ("batch", "states", "asked", "whole")}
        self.values = cast(Tensor, names["values"])
        self.read = self.actor.read_log_prob(self.made["whole"])["log_probs"]
        self.texts = [str(text) for text in answers(self.made["whole"], self.tokenizer)]
        return Metrics()


def test_the_documented_algorithm_learns(model: str) -> None:
    kind = cast(Callable[..., RLHFAlgorithm], run_documented("class Mine(RLHFAlgorithm)")["Mine"])
    numbers = run(
        kind(actor=actor(model), reward=Reward(functions="length"), group_size=2), data(), steps=1
    ).numbers[0]
    assert numbers["response/samples_per_prompt"] == 2
    assert numbers["actor/grad_norm"] > 0


def test_answers_are_continued_as_documented(model: str) -> None:
    stops = tuple(range(40))
    sampling = Sampling(max_new_tokens=6, stop_token_ids=stops)
    algorithm = Vine(actor=Actor(path=model, sampling=sampling), reward=Reward(functions="length"))
    run(algorithm, data(), steps=1)
    batch, states, asked, whole = algorithm.made.values()
    lengths = batch["response_mask"].sum(dim=1)
    expected = [(row, cut) for cut in (2, 4) for row in range(8) if lengths[row] > cut]
    assert 8 < len(expected) < 16, "some answers go on, and some do not"
    assert len(states["row_ids"].unique()) == len(states) == len(expected)
    assert not set(states["row_ids"].tolist()) & set(batch["row_ids"].tolist())
    for at, (row, cut) in enumerate(row for row in expected for _ in range(3)):
        prompt, said = asked["response_ids"][at], asked["response_mask"][at]
        answer = [*batch["response_ids"][row][:cut].tolist(), *prompt[said].tolist()][:6]
        assert whole["response_ids"][at][whole["response_mask"][at]].tolist() == answer
        assert torch.equal(
            whole["prompt_ids"][at][whole["prompt_mask"][at]],
            batch["prompt_ids"][row][batch["prompt_mask"][row]],
        )
        drawn = asked["log_probs"][at][: len(answer) - cut]
        assert torch.allclose(algorithm.read[at][cut : len(answer)], drawn, atol=1e-5), "as it goes on"
        assert bool(whole["row_truncated"][at]) == (answer[-1] not in (*stops, 258))
        assert row_numbers(whole)[at] == row_numbers(batch)[row]
    outcomes = torch.tensor([len(text) / 256 for text in algorithm.texts]).view(-1, 3).mean(dim=1)
    assert torch.allclose(algorithm.values, outcomes)
    assert outcomes.unique().numel() > 2
    assert len(whole["response_ids"].unique(dim=0)) > len(expected), "by draws of their own"
