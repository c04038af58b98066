"""Row ids decide which answers are drawn: rows that share one are told of, and how to draw once more."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import GRPO, SFT
from rlhf_lightning.controller import Batch, Metrics
from rlhf_lightning.data import TaskData, load_tokenizer, prompt_columns
from rlhf_lightning.data.batch import EncodedRow
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import asking
from tests.unit.algos.short import grpo, trainer


@dataclass(kw_only=True, eq=False, repr=False)
class Drawn(TaskData):
    """Reads its rows in the order of given keys."""

    keys: list[int] = field(default_factory=list)

    def train_dataloader(self) -> DataLoader[list[EncodedRow]]:  # type: ignore[override]
        sampler = self.keys  # any iterable of keys is one
        return DataLoader(
            self._encoded(), batch_size=self.batch_size, sampler=sampler, collate_fn=self._collate
        )


def told(
    algorithm: RLHFAlgorithm, keys: list[int], root: Path, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """What is said of two batches of such rows."""
    caplog.clear()
    data = Drawn(keys=keys, batch_size=4, num_rows=4, num_val_rows=0, completions=True)
    with caplog.at_level(logging.WARNING):
        trainer(Local(), root, steps=len(keys) // 4).fit(algorithm, datamodule=data)
    return [record.getMessage() for record in caplog.records if "row id" in record.getMessage()]


def test_rows_that_come_twice_in_a_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    twice = [3, 1, 3, 0]
    assert told(grpo(), [*twice, *twice], tmp_path, caplog) == [
        "1 of the 4 rows of a batch have the row id of another, such as 3, and its answers: let the sampler "
        "yield keys n << 32 | index, with another n each time that it draws a row."
    ]
    anew = [n << 32 | index for n, index in enumerate(twice)]
    assert told(grpo(), anew, tmp_path, caplog) == []
    assert told(grpo(), [3, 1, 2, 0] * 2, tmp_path, caplog) == [], "once in each of two batches"
    assert told(SFT(), twice, tmp_path, caplog) == [], "nothing is drawn"


class Again(GRPO):
    """Draws twice for the same prompts."""

    def step(self, batch: Batch) -> Metrics:
        """As the documents say, and without."""
        other = batch | {"row_ids": batch["row_ids"] + (1 << 40)}
        first, same, new = (
            self.actor.generate_sequences(self.answers_to(prompts, 4))["response_ids"]
            for prompts in (batch, batch, other)
        )
        return Metrics.of({"same": float(torch.equal(first, same)), "new": float(torch.equal(first, new))})


def test_a_prompt_is_drawn_once_more_by_other_ids(tmp_path: Path) -> None:
    fit = trainer(Local(), tmp_path)
    fit.fit(grpo(Again), datamodule=TaskData(batch_size=4, num_rows=4, num_val_rows=0))
    assert [float(fit.callback_metrics[name]) for name in ("same", "new")] == [1, 0]


class Asking(GRPO):
    """Is asked its own prompts, as a question about its answers."""

    def step(self, batch: Batch) -> Metrics:
        """Whether answers are those of the rows: of the same ids, and of one question after another."""
        texts = [str(row["prompt"]) for row in batch.objects("rows")]  # type: ignore[index]
        plain = batch.select(["row_ids"]) | prompt_columns(texts, self.tokenizer)
        first, second = (asking(batch, texts, self.tokenizer, number=number) for number in (1, 2))
        then = asking(first, texts, self.tokenizer)
        said = [self.actor.generate_sequences(r)["response_ids"] for r in (batch, plain, first, second, then)]
        pairs = {"same": (0, 1), "first": (0, 2), "second": (0, 3), "other": (2, 3), "then": (2, 4)}
        return Metrics.of({name: float(torch.equal(said[a], said[b])) for name, (a, b) in pairs.items()})


def test_a_question_is_not_answered_with_the_draws_of_what_it_asks_about(tmp_path: Path) -> None:
    fit = trainer(Local(), tmp_path)
    fit.fit(grpo(Asking), datamodule=TaskData(batch_size=4, num_rows=4, num_val_rows=0))
    like = {name: float(fit.callback_metrics[name]) for name in ("same", "first", "second", "other", "then")}
    assert like == {"same": 1, "first": 0, "second": 0, "other": 0, "then": 0}


def test_questions_are_counted_from_one() -> None:
    batch = Batch.of({"row_ids": torch.arange(2), "rows": [{}, {}]})
    with pytest.raises(ValueError, match=r"^asking\(number=0\): counts the questions about a batch, from 1"):
        asking(batch, ["a", "b"], load_tokenizer("embedded"), number=0)


@pytest.mark.parametrize("times", [0, -1])
def test_each_prompt_is_answered_at_least_once(times: int) -> None:
    batch = Batch.of({"row_ids": torch.arange(2)})
    assert grpo().answers_to(batch, 1)["row_ids"].tolist() == [0, 1]
    with pytest.raises(ValueError, match=rf"^answers_to\(batch, {times}\): leaves no prompt to be"):
        grpo().answers_to(batch, times)
