"""Which row of the data a row of a batch is, in every epoch and after it was repeated."""

from __future__ import annotations

import pytest

from rlhf_lightning.controller import Batch
from rlhf_lightning.data import PreferenceData, RowData, TaskData, load_tokenizer
from rlhf_lightning.reporting import row_numbers
from rlhf_lightning.workers import asking
from tests.unit.algos.short import grpo


def epochs(data: RowData) -> list[Batch]:
    """The batches of two epochs."""
    data.setup("fit")
    loader = data.train_dataloader()
    return [Batch.of(columns) for _ in range(2) for columns in loader]  # type: ignore[arg-type]


def prompts(data: RowData, numbers: list[int]) -> list[object]:
    return [data.train_rows[number]["prompt"] for number in numbers]


@pytest.mark.parametrize("times", [1, 3])
def test_prompts(times: int) -> None:
    data = TaskData(num_rows=6, num_val_rows=0, batch_size=3, tokenizer="embedded")
    for batch in epochs(data):
        rows = grpo().answers_to(batch, times)
        found = [row["prompt"] for row in rows.objects("rows")]  # type: ignore[index]
        assert prompts(data, row_numbers(rows).tolist()) == found
        assert row_numbers(batch).tolist() == [key % 2**32 for key in batch["row_ids"].tolist()]


def test_pairs() -> None:
    texts = [{"prompt": f"Sort {n}: ", "chosen": f"{n}", "rejected": "0"} for n in (12, 34, 56)]
    data = PreferenceData.from_rows(texts, batch_size=2, tokenizer="embedded")
    for batch in epochs(data):
        numbers = row_numbers(batch).tolist()
        assert numbers[::2] == numbers[1::2]
        found = [row["prompt"] for row in batch.objects("rows")]  # type: ignore[index]
        assert prompts(data, numbers) == found
        second = [key % 2**32 for key in batch["row_ids"].tolist()[1::2]]
        assert second == [number + 1 for number in numbers[1::2]]


@pytest.mark.parametrize("times", [1, 3])
def test_answers_to_answers(times: int) -> None:
    """As of several verdicts on each answer, of which questions were made, and of states of answers."""
    data = TaskData(num_rows=6, num_val_rows=0, batch_size=3, tokenizer="embedded")
    for batch in epochs(data):
        answered = grpo().answers_to(batch, 2)
        moved = answered.take([4, 1]) | {"row_ids": answered["row_ids"][[4, 1]] + (1 << 48)}
        questions = asking(answered, ["?"] * len(answered), load_tokenizer("embedded"))
        for given in (answered, moved, questions, asking(batch, ["?"] * 3, load_tokenizer("embedded"))):
            again = grpo().answers_to(given, times)
            for rows in (given, again, grpo().answers_to(again, 2)):
                found = [row["prompt"] for row in rows.objects("rows")]  # type: ignore[index]
                assert prompts(data, row_numbers(rows).tolist()) == found
            assert again["group_ids"].tolist() == given["row_ids"].repeat_interleave(times).tolist()
