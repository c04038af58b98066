"""Rows of several files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from rlhf_lightning.data import PromptData, TextData
from tests.unit.data.conftest import Writer

OPTIONS: dict[str, Any] = {"tokenizer": "embedded", "batch_size": 1}


@pytest.fixture
def files(write_rows: Writer) -> list[str]:
    """Three rows and two, of which one names its source; texts, too."""
    rows: list[list[dict[str, object]]] = [
        [{"prompt": w, "text": w} for w in words] for words in ("abc", "de")
    ]
    rows[0][0] |= {"data_source": None}
    rows[1][1] |= {"data_source": "own", "kind": "sort"}
    return [str(write_rows(*part, name=f"{name}.jsonl")) for name, part in zip("xy", rows, strict=True)]


def seen(data: PromptData) -> list[list[tuple[object, object]]]:
    """Prompts and sources of the training rows, and of those held out."""
    data.setup("fit")
    parts = (data.train_rows, data.held_out_rows)
    return [[(row["prompt"], row["data_source"]) for row in rows] for rows in parts]


def test_a_row_is_of_its_own_file(files: list[str]) -> None:
    whole = [("a", "x"), ("b", "x"), ("c", "x"), ("d", "y"), ("e", "own")]
    assert seen(PromptData(path=files, val_path=files[::-1], **OPTIONS)) == [whole, whole[3:] + whole[:3]]
    ends = [[("a", "x"), ("d", "y")], [("c", "x"), ("e", "own")]]
    assert seen(PromptData(path=files, val_rows=1, limit=1, **OPTIONS)) == ends
    one = [whole[:3], [("d", "x"), ("e", "own")]]
    assert seen(PromptData(path=files[0], val_path=files[1], **OPTIONS)) == one, "the source of both"
    listed = [whole[:3], whole[3:]]
    assert seen(PromptData(path=files[0], val_path=files[1:], **OPTIONS)) == listed


def test_a_source_that_is_given_or_another_field(files: list[str]) -> None:
    kinds = seen(PromptData(path=files, data_source_field="kind", **OPTIONS))[0]
    assert [source for _, source in kinds] == ["x", "x", "x", "y", "sort"]
    given = seen(PromptData(path=files, data_source="mine", **OPTIONS))[0]
    assert [source for _, source in given] == [*["mine"] * 4, "own"]


def test_row_ids_differ_over_the_files(files: list[str]) -> None:
    data = PromptData(path=files, shuffle=False, **OPTIONS | {"batch_size": 5})
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert batch["row_ids"].tolist() == [0, 1, 2, 3, 4]


def test_texts_follow_one_another(files: list[str]) -> None:
    data = TextData(path=files, val_rows=1, block_tokens=99, **OPTIONS)
    data.setup("fit")
    assert [len(data.train_rows), data.train_rows[0]["data_source"]] == [1, "x+y"]
    (batch,) = data.train_dataloader()
    tokens = [*batch["prompt_ids"][0].tolist(), *batch["response_ids"][0].tolist()]
    assert [token for token in tokens if token < 256] == [97, 98, 100]


def test_messages_name_the_files(files: list[str], write_rows: Writer) -> None:
    third = str(write_rows({"prompt": 3}, name="z.jsonl"))
    both = re.escape(f"{files[0]} + {third}")
    with pytest.raises(ValueError, match=rf"^{both}, row 4: the field 'prompt' holds 3 \(int\)"):
        seen(PromptData(path=[files[0], third], **OPTIONS))
    with pytest.raises(ValueError, match=rf"val_rows=2: {files[1]} has 2 rows"):
        seen(PromptData(path=files, val_rows=2, **OPTIONS))


def test_they_are_typed_as_a_list(files: list[str], tmp_path: Path) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(PromptData, "data")
    parser.add_argument("--config", action="config")
    config = tmp_path / "config.yaml"
    config.write_text(f"data: {{class_path: PromptData, init_args: {{path: {files}}}}}")
    for words in (["--data=PromptData", f"--data.path=[{','.join(files)}]"], [f"--config={config}"]):
        assert parser.parse_args(words).data.init_args.path == files
    one = parser.parse_args(["--data=PromptData", f"--data.path={files[0]}"])
    assert one.data.init_args.path == files[0]
