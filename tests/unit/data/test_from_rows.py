"""Rows that are in memory: a list of dicts, or a Hugging Face data set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from rlhf_lightning.data import MixedData, PreferenceData, PromptData, RowData, TextData
from rlhf_lightning.strategies import Local
from tests.unit.algos.short import grpo, trainer
from tests.unit.data.conftest import Writer

ROWS = [{"prompt": f"p{n}", "answer": n} for n in range(6)]


def rows_of(data: RowData) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    data.setup("fit")
    return data.train_rows, data.held_out_rows


def test_they_are_as_those_of_a_file(write_rows: Writer) -> None:
    options: dict[str, Any] = {"tokenizer": "embedded", "batch_size": 2, "val_rows": 2, "data_source": "a"}
    given = PromptData.from_rows(iter(ROWS), **options)
    assert rows_of(given) == rows_of(PromptData(path=str(write_rows(*ROWS)), **options))
    first, again = next(iter(given.train_dataloader())), rows_of(PromptData.from_rows(ROWS, **options))[0]
    assert first["prompt_ids"].shape == (2, 2)
    assert [row["answer"] for row in again] == [0, 1, 2, 3]
    assert ROWS[0] == {"prompt": "p0", "answer": 0}, "a caller's own rows stay as they are"


def test_others_may_be_held_out_and_the_first_be_taken() -> None:
    data = PromptData.from_rows(ROWS, held_out=ROWS[:1], limit=3, tokenizer="embedded", batch_size=2)
    train, held_out = rows_of(data)
    assert ([row["answer"] for row in train], [row["answer"] for row in held_out]) == ([0, 1, 2], [0])
    assert {row["data_source"] for row in train} == {"memory"}


def test_a_data_set_and_pairs() -> None:
    datasets = pytest.importorskip("datasets")
    pairs = datasets.Dataset.from_list([{"prompt": "p", "chosen": "c", "rejected": "r"}])
    data = PreferenceData.from_rows(pairs, tokenizer="embedded", batch_size=1)
    assert rows_of(data)[0][0]["chosen"] == "c"


def test_a_run_learns_from_them(tmp_path: Path, write_rows: Writer) -> None:
    data = PromptData.from_rows(ROWS, held_out=ROWS[:2], batch_size=2)
    run = trainer(Local(), tmp_path, steps=2, limit_val_batches=1)
    run.fit(grpo(), datamodule=data)
    assert run.global_step == 2
    texts = TextData(path=str(write_rows({"text": "some text"})), batch_size=1, tokenizer="embedded")
    both = MixedData(main=PromptData.from_rows(ROWS, batch_size=2, tokenizer="embedded"), ptx=texts)
    both.setup("fit")
    assert both.main.train_rows[0]["prompt"] == "p0"


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([], {}, r"^PromptData\.from_rows\(rows\): there are no rows"),
        (["text"], {}, r"^memory, row 1: is a str, and has to be a mapping"),
        (ROWS, {"held_out": ROWS, "val_rows": 1}, r"give one of them"),
        (ROWS, {"held_out": ROWS, "val_path": "x.jsonl"}, r"give one of them"),
        ([{"text": "p"}], {"tokenizer": "embedded"}, r"memory, row 1 has no such field; it has: text"),
    ],
)
def test_what_is_refused(rows: object, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PromptData.from_rows(cast(Iterable[Mapping[str, object]], rows), **options).setup("fit")


@pytest.mark.parametrize("path", [ROWS, [], "", [""], None, 3])
def test_what_is_no_path(path: object) -> None:
    with pytest.raises(ValueError, match=r"^data\.path=.*: this is the name of .* PromptData\.from_rows"):
        PromptData(path=path)  # type: ignore[arg-type]
    if path is not None:
        with pytest.raises(ValueError, match=r"^data\.val_path=.*: this is the name of "):
            PromptData(path="a.jsonl", val_path=path)  # type: ignore[arg-type]


def test_half_a_character_is_told_where_it_stands() -> None:
    data = PromptData.from_rows(
        [{"prompt": "a"}, {"prompt": "so \ud83d sad"}], tokenizer="embedded", batch_size=1
    )
    with pytest.raises(ValueError, match=r"half a character \('\\ud83d'\) .* in 'so \\ud83d sad'"):
        data.setup("fit")
