"""What an iteration logs is its own, whatever the ones before it have logged."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from rlhf_lightning.algos import GRPO, RLOO, ReinforcePP
from rlhf_lightning.controller import Batch, CallReport, Metrics
from rlhf_lightning.data import PromptData, TaskData, load_tokenizer
from rlhf_lightning.reporting import answers, response_metrics, texts, timings
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Reward
from tests.unit.algos.short import grpo, trainer
from tests.unit.algos.small import run, write_rows


class Sometimes(GRPO):
    """Learns in every other iteration, and logs numbers of its own in each."""

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self.log("mine/start", float(batch_idx))

    def step(self, batch: Batch) -> Metrics:
        number = float(self.global_step)
        self.log("mine/step", number)
        self.log("mine/both", number, on_step=True, on_epoch=True)
        self.log("mine/epoch", number, on_step=False, on_epoch=True)
        if self.global_step % 2:
            return Metrics.of({"mine/odd": number})
        return {"mine/before": number} | super().step(batch) | {"mine/even": number}


def test_a_number_that_an_iteration_has_not_is_left_empty(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    run = trainer(Local(), tmp_path, steps=4, logger=logger, log_every_n_steps=1)
    run.fit(grpo(Sometimes), datamodule=TaskData(batch_size=2, num_rows=8, num_val_rows=2))
    with (tmp_path / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    every = [row for row in rows if row["mine/step"]]
    assert [float(row["mine/step"]) for row in every] == [0, 1, 2, 3]
    for even, odd in (every[:2], every[2:]):
        assert even["actor/loss"]
        assert even["time/actor.update_actor_s"]
        assert even["mine/before"] == even["mine/even"] == even["mine/step"]
        assert (even["mine/odd"], odd["mine/odd"]) == ("", odd["mine/step"])
        for name in ("actor/loss", "mine/even", "mine/before", "time/actor.update_actor_s"):
            assert odd[name] == "", name
    assert [row["mine/start"] for row in every] == [row["mine/both_step"] for row in every]
    for name in ("mine/epoch", "mine/both_epoch"):
        assert [float(row[name]) for row in rows if row[name]] == [pytest.approx(1.5)]


def test_no_answers_have_no_texts() -> None:
    ids, mask = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.bool)
    prompts = {"prompt_ids": ids, "prompt_mask": mask}
    rows, tokenizer = (
        Batch.of(prompts | {"response_ids": ids, "response_mask": mask}),
        load_tokenizer("embedded"),
    )
    assert texts(rows, tokenizer) == {"prompts": [], "responses": []}
    assert answers(rows, tokenizer) == []


class Behind(GRPO):
    """Learns from the prompts of the iteration before, as where generation is a batch ahead."""

    before: Batch | None = None

    def step(self, batch: Batch) -> Metrics:
        self.before, taken = batch, self.before or batch
        return super().step(taken)


def test_the_pace_counts_the_prompts_that_were_answered(tmp_path: Path) -> None:
    lengths = (3, 9, 27)
    rows: list[dict[str, object]] = [{"prompt": "x" * length} for length in lengths]
    data = PromptData(path=write_rows(tmp_path / "rows.jsonl", rows), batch_size=1, shuffle=False)
    for numbers, length in zip(run(grpo(Behind), data, steps=3).numbers, (3, 3, 9), strict=True):
        assert numbers["prompt/tokens"] == 2 * length, "two answers"
        tokens = numbers["prompt/tokens"] + numbers["response/tokens"]
        assert numbers["throughput/tokens_per_s"] * numbers["time/step_s"] == pytest.approx(tokens)


class Timed(GRPO):
    """Returns a metric of its own by the name of one that the run takes."""

    def step(self, batch: Batch) -> Metrics:
        return super().step(batch) | {"time/step_s": 1.0}


def test_a_metric_that_the_run_measures_is_not_returned_too(tmp_path: Path) -> None:
    data = TaskData(batch_size=2, num_rows=2, num_val_rows=0)
    told = r"^step returned the metric 'time/step_s', which the run measures: .* such as 'mine/step_s'\.$"
    with pytest.raises(ValueError, match=told):
        trainer(Local(), tmp_path, steps=1).fit(grpo(Timed), datamodule=data)


def levels(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """The score of an answer is the length of its prompt; those to the shortest differ."""
    del responses, rows
    return [float(place % 2 if len(prompt) == 1 else len(prompt)) for place, prompt in enumerate(prompts)]


@pytest.mark.parametrize("kind", [GRPO, RLOO, ReinforcePP])
def test_answers_of_one_score_to_a_prompt_are_seen_beside_others(
    kind: type[GRPO | ReinforcePP], model: str, tmp_path: Path
) -> None:
    actor = Actor(path=model, sampling=Sampling(max_new_tokens=2))
    reward = Reward(functions=f"{__name__}.levels")
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "x" * length} for length in range(1, 5)])
    data = PromptData(path=path, batch_size=4)
    (numbers,) = run(kind(actor=actor, reward=reward, group_size=2), data, steps=1).numbers
    assert numbers["response/tied_prompts"] == 0.75
    assert numbers["reward/std"] > 1


def test_answers_alone_have_no_ties(model: str, tmp_path: Path) -> None:
    algorithm = ReinforcePP(actor=Actor(path=model, sampling=Sampling(max_new_tokens=2)))
    (numbers,) = run(algorithm, TaskData(batch_size=2, num_rows=2, num_val_rows=0), steps=1).numbers
    assert numbers["response/samples_per_prompt"] == 1
    assert "response/tied_prompts" not in numbers


@pytest.mark.parametrize(("groups", "each"), [([4, 4, 5, 5], 2.0), ([7, 4, 4, 4], 2.0), ([1, 2, 3, 4], 1.0)])
def test_answers_to_a_prompt_are_counted_for_whoever_asks(groups: list[int], each: float) -> None:
    columns = {"response_mask": torch.ones(4, 2), "row_truncated": torch.zeros(4, dtype=torch.bool)}
    batch = Batch.of(columns)
    assert "response/samples_per_prompt" not in response_metrics(batch, actor=Actor(), parts=())
    batch |= {"group_ids": torch.tensor(groups)}
    assert response_metrics(batch, actor=Actor(), parts=())["response/samples_per_prompt"] == each


def test_given_answers_are_not_described() -> None:
    drawn = Batch.of({"response_mask": torch.ones(2, 2), "row_truncated": torch.zeros(2, dtype=torch.bool)})
    whole = Batch.joined([Batch.of({"response_mask": torch.ones(2, 2)}), drawn])
    with pytest.raises(ValueError, match=r"^rollout_metrics describes .* no 'row_truncated'.*before the two"):
        response_metrics(whole, actor=Actor(), parts=())


def test_a_method_takes_as_long_as_on_its_slowest_device() -> None:
    seconds = ((1, 3.0), (0, 1.0), (1, 2.0), (0, 1.0))
    calls = [CallReport("actor", "update_actor", rank, 0.0, s, 2_000_000_000, None) for rank, s in seconds]
    assert timings(calls) == {"time/actor.update_actor_s": 5.0, "memory/device_gb": 2.0}


def test_the_divergence_is_a_mean_over_the_answers_that_have_tokens() -> None:
    """Of what it is a token in each; an answer without tokens has none."""
    tokens = torch.tensor([1, 3, 0])
    mask = torch.arange(3) < tokens[:, None]
    rows = {"row_kl": torch.tensor([0.2, 0.6, 0.0]), "row_tokens": tokens, "response_mask": mask}
    batch = Batch.of(rows | {"row_truncated": tokens > 3})
    assert response_metrics(batch, actor=Actor(), parts=())["actor/kl"] == pytest.approx(0.4)
