"""CompletionData: responses to imitate."""

from __future__ import annotations

import logging

import pytest

from rlhf_lightning.data import CompletionData
from tests.unit.data.conftest import Writer


def completion_data(file: object, **options: object) -> CompletionData:
    given = {"path": str(file), "tokenizer": "embedded", "batch_size": 2, "shuffle": False}
    data = CompletionData(**given | options)  # type: ignore[arg-type]
    data.setup("fit")
    return data


def test_responses_are_right_padded_and_end(write_rows: Writer) -> None:
    file = write_rows({"prompt": "a", "response": "x"}, {"prompt": "bc", "response": "yz"})
    batch = next(iter(completion_data(file).train_dataloader()))
    assert batch["prompt_ids"].tolist() == [[256, 97], [98, 99]]
    assert batch["response_ids"].tolist() == [[120, 258, 256], [121, 122, 258]]
    assert batch["response_mask"].tolist() == [[True, True, False], [True, True, True]]


def test_long_responses_are_dropped(write_rows: Writer, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "a" * p, "response": "x" * r} for p, r in ((1, 1), (5, 1), (1, 4), (5, 4), (1, 3))]
    with caplog.at_level(logging.WARNING):
        data = completion_data(write_rows(*rows), max_prompt_tokens=4, max_response_tokens=4)
    assert [row["response"] for row in data.train_rows] == ["x", "xxx"], "the end token counts"
    assert "3 of 5 rows dropped (2 with a prompt longer than" in caplog.text
    assert "2 with a response longer than data.max_response_tokens=4)" in caplog.text


def test_row_without_a_response(write_rows: Writer) -> None:
    file = write_rows({"prompt": "a", "response": "x"}, {"prompt": "b"})
    with pytest.raises(
        ValueError, match=r"data\.response_field=response: .*row 2 has no such field; it has: prompt"
    ):
        completion_data(file)
    with pytest.raises(ValueError, match=r"row 1: the field 'response' holds a int; a response is a text"):
        completion_data(write_rows({"prompt": "a", "response": 3}))
