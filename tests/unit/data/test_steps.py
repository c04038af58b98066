"""StepData: where a step ends, and what it is worth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_lightning.data import StepData
from rlhf_lightning.data.tokenizer import load_tokenizer, token_texts
from rlhf_lightning.rewards import step_ends
from tests.unit.data.conftest import Writer, batches, write_spacing

ROWS = (
    {"prompt": "a", "steps": ["xy", "z"], "labels": [1, 0.25]},
    {"prompt": "bc", "steps": ["u"], "labels": [True]},
    {"prompt": "d", "steps": ["é", "w"], "labels": [False, 1.0]},
)


def steps(file: Path, **options: object) -> StepData:
    given = {"path": str(file), "tokenizer": "embedded", "batch_size": 2, "shuffle": False}
    return StepData(**given | options)  # type: ignore[arg-type]


def refused(file: Path) -> str:
    with pytest.raises(ValueError, match=r"row 2") as error:
        steps(file).setup("fit")
    return str(error.value).replace(str(file), "FILE")


def test_the_last_token_of_a_step_carries_its_label(write_rows: Writer) -> None:
    first, last = batches(steps(write_rows(*ROWS)))
    assert first["response_ids"].tolist() == [[120, 121, 10, 122, 258], [117, 258, 256, 256, 256]]
    assert first["response_mask"].sum(1).tolist() == [5, 2]
    assert first["step_mask"].tolist() == [
        [False, False, True, False, True],
        [False, True, False, False, False],
    ]
    assert first["step_labels"].tolist() == [[0, 0, 1, 0, 0.25], [0, 1, 0, 0, 0]]
    assert (first["step_mask"].dtype, first["step_labels"].dtype) == (torch.bool, torch.float32)
    assert last["response_ids"].tolist() == [[195, 169, 10, 119, 258]]
    assert last["step_mask"].nonzero().tolist() == [[0, 2], [0, 4]], "a false step is a step"
    assert last["step_labels"].tolist() == [[0, 0, 0, 0, 1]]


@pytest.mark.parametrize(("separator", "ends"), [("", [1, 3]), ("\n\n", [3, 5])])
def test_the_separator_belongs_to_its_step(write_rows: Writer, separator: str, ends: list[int]) -> None:
    batch = batches(steps(write_rows(ROWS[0]), separator=separator, batch_size=1))[0]
    assert batch["step_mask"].nonzero()[:, 1].tolist() == ends
    assert batch["response_ids"][0, -1] == 258


@pytest.mark.parametrize("separator", ["\n", "\n\n", "; "])
@pytest.mark.parametrize("last", ["z", "\ttwo words ", "z<eos>", "z;"])
def test_answers_are_scored_where_labels_are(write_rows: Writer, separator: str, last: str) -> None:
    """Of the same text from a model: labels are nowhere else, and the score of no step at another token."""
    row = {"prompt": "a", "steps": (written := ["x y", "1+1=2.", last]), "labels": [1, 0, 1]}
    batch = batches(steps(write_rows(row), separator=separator, batch_size=1))[0]
    ids = batch["response_ids"][0].tolist()
    texts = token_texts({*ids}, load_tokenizer("embedded"))
    assert "".join(texts[i] for i in ids) == separator.join(written).removesuffix("<eos>")
    ends = step_ends([texts[i] for i in ids], separator)
    assert batch["step_mask"][0].nonzero().flatten().tolist() == ends
    assert len(ends) == 3
    assert ids.count(258) == 1


def test_a_step_begins_without_a_space_that_nobody_wrote(write_rows: Writer, tmp_path: Path) -> None:
    path = write_spacing(tmp_path / "spacing", "\na12+=", template=None)
    file = write_rows({"prompt": "a", "steps": ["1+1", "=2", " a"], "labels": [1, 0, 1]})
    batch = batches(steps(file, tokenizer=path, batch_size=1))[0]
    read = "".join("<\u2581\na12+="[token] for token in batch["response_ids"][0].tolist())
    assert read == "1+1\n=2\n\u2581a<"
    assert batch["step_mask"].nonzero()[:, 1].tolist() == [3, 6, 9]


def test_long_solutions_are_dropped(write_rows: Writer) -> None:
    data = steps(write_rows(*ROWS), max_response_tokens=4, batch_size=1)
    assert [batch["rows"][0]["prompt"] for batch in batches(data)] == ["bc"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"labels": [1]}, "2 steps in 'steps' and 1 labels in 'labels'. Give one label a step."),
        ({"labels": []}, "2 steps in 'steps' and 0 labels"),
        (
            {"labels": [1, 1.5]},
            "the field 'labels' holds [1, 1.5] (list); labels are a list of numbers from 0",
        ),
        ({"labels": [1, float("nan")]}, "the field 'labels' holds [1, nan]"),
        ({"labels": [1, "0"]}, "the field 'labels' holds [1, '0']"),
        ({"labels": 1}, "the field 'labels' holds 1 (int)"),
        ({"labels": None}, "the field 'labels' holds None (NoneType)"),
        (
            {"steps": "xy"},
            "the field 'steps' holds 'xy' (str); steps are a list of texts, none of them blank.",
        ),
        ({"steps": []}, "the field 'steps' holds [] (list)"),
        ({"steps": ["x", " \n"]}, "the field 'steps' holds ['x', ' \\n'] (list)"),
        ({"steps": ["x", 3]}, "the field 'steps' holds ['x', 3] (list)"),
        ({"steps": ["x\ny", "z"]}, "step 1 of 'steps', 'x\\ny', holds the separator '\\n'. Answers are"),
        ({"steps": ["x", "y\n"]}, "step 2 of 'steps', 'y\\n', holds the separator '\\n'"),
        ({"steps": ["x", "\ny"]}, "step 2 of 'steps', '\\ny', holds the separator '\\n'"),
        ({"prompt": ""}, "the prompt '' has no tokens"),
    ],
)
def test_rows_that_make_no_sense(write_rows: Writer, row: dict[str, object], said: str) -> None:
    message = refused(write_rows(ROWS[0], {**ROWS[0], **row}))
    assert f"FILE, row 2: {said}" in message


def test_a_field_that_is_missing(write_rows: Writer) -> None:
    for field in ("prompt", "steps", "labels"):
        row = {name: value for name, value in ROWS[0].items() if name != field}
        assert f"data.{field.removesuffix('s')}" in refused(write_rows(ROWS[0], row)).replace(
            "s_field", "_field"
        )
