"""UnpairedData: responses that are desirable or not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from rlhf_lightning.data import UnpairedData
from tests.unit.data.conftest import Writer, batches

ROWS = (
    {"prompt": "a", "response": "xy", "label": True},
    {"prompt": "bc", "response": "z", "label": 0},
    {"prompt": "d", "response": "u", "label": 1},
)
PAIRS = (
    {"prompt": "a", "chosen": "x", "rejected": "y"},
    {"prompt": "b", "chosen": "u", "rejected": "u"},
    {"prompt": "c", "chosen": "v", "rejected": "w"},
)


def unpaired(file: Path, **options: object) -> UnpairedData:
    given = {"path": str(file), "tokenizer": "embedded", "batch_size": 2, "shuffle": False}
    return UnpairedData(**given | options)  # type: ignore[arg-type]


def test_labels_stand_beside_the_responses(write_rows: Writer) -> None:
    first, last = batches(unpaired(write_rows(*ROWS)))
    assert first["prompt_ids"].tolist() == [[256, 97], [98, 99]]
    assert first["response_ids"].tolist() == [[120, 121, 258], [122, 258, 256]]
    assert first["labels"].tolist() == [True, False]
    assert first["labels"].dtype == torch.bool
    assert first["row_ids"].tolist() == [0, 1]
    assert last["labels"].tolist() == [True]


def test_a_pair_is_two_rows(write_rows: Writer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = unpaired(write_rows(*PAIRS), from_pairs=True, batch_size=3)
        first, last = batches(data)
    assert first["response_ids"][:, 0].tolist() == [120, 121, 118]
    assert first["labels"].tolist() == [True, False, True]
    assert last["response_ids"].tolist() == [[119, 258]]
    assert last["labels"].tolist() == [False]
    assert first["row_ids"].tolist() + last["row_ids"].tolist() == [0, 1, 2, 3]
    assert (data.batch_rows, len(data.train_rows)) == (3, 4)
    assert "1 of 3 rows dropped" in caplog.text
    assert "1 with the same response twice" in caplog.text


@pytest.mark.parametrize("label", ["yes", "true", 2, -1, 1.0, None, [True]])
def test_a_label_of_another_type(write_rows: Writer, label: object) -> None:
    file = write_rows(*ROWS, {**ROWS[0], "label": label})
    with pytest.raises(ValueError, match=r"true or false, or 1 or 0") as error:
        unpaired(file).setup("fit")
    assert f"{file}, row 4: the field 'label' holds {label!r} ({type(label).__name__})" in str(error.value)


def test_a_field_that_is_missing(write_rows: Writer) -> None:
    with pytest.raises(
        ValueError, match=r"data\.label_field=label: .*row 1 has no such field; it has: prompt"
    ):
        unpaired(write_rows({"prompt": "a", "response": "b"})).setup("fit")
    with pytest.raises(ValueError, match=r"data\.response_field=response: .*Type one of these as --data"):
        unpaired(write_rows(*PAIRS)).setup("fit")
    with pytest.raises(ValueError, match=r"data\.chosen_field=chosen: "):
        unpaired(write_rows(*ROWS), from_pairs=True).setup("fit")


def test_a_prompt_of_a_pair_is_predicted_once(write_rows: Writer) -> None:
    data = unpaired(write_rows(*PAIRS), from_pairs=True, batch_size=1)
    data.setup("predict")
    found = list(data.predict_dataloader())
    assert [batch["prompt_ids"].tolist() for batch in found] == [[[97]], [[99]]]
    assert [batch["rows"][0]["prompt"] for batch in found] == ["a", "c"]


@pytest.mark.parametrize("from_pairs", [False, True])
def test_a_response_may_be_too_long(write_rows: Writer, *, from_pairs: bool) -> None:
    rows = [dict(row) for row in (PAIRS if from_pairs else ROWS)]
    rows[0] |= {"chosen": "xyz"} if from_pairs else {"response": "xyz"}
    (batch,) = batches(unpaired(write_rows(*rows), from_pairs=from_pairs, max_response_tokens=3))
    assert batch["prompt_ids"][:, -1].tolist() == ([99, 99] if from_pairs else [99, 100])
