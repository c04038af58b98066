"""Tools and calls are the row's own, whether JSON or an Arrow table holds the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.data import CompletionData, PromptData
from rlhf_lightning.data.arrow import without_nulls
from rlhf_lightning.data.rows import read_rows
from tests.unit.data.conftest import write_template

TEMPLATE = (
    "{{ tools | tojson if tools else '' }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{{ 'name' in m }}"
    "{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
)


def row(name: str, *arguments: str) -> dict[str, Any]:
    """A row whose tool takes these arguments, and whose conversation calls it."""
    properties = {argument: {"type": "string"} for argument in arguments}
    called = {"type": "function", "function": {"name": name, "arguments": dict.fromkeys(arguments, "1")}}
    return {
        "prompt": [{"role": "user", "content": name}],
        "messages": [
            {"role": "user", "content": name},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "content": "5", "name": name},
            {"role": "assistant", "content": "five"},
        ],
        "tools": [{"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}],
    }


ROWS = [row("weather", "city", "content"), row("add", "x", "y"), {**row("say", "what"), "tools": None}]


@pytest.fixture
def written(tmp_path: Path) -> list[str]:
    """The same rows as JSON, as Parquet, and as a data set."""
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "set")
    return [str(tmp_path / name) for name in ("rows.json", "rows.parquet", "set")]


def prompts(data: PromptData) -> list[str]:
    data.setup("fit")
    return [str(told["prompt"]) for told in data.train_rows]


def test_prompts_are_those_of_json(written: list[str], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    options: dict[str, Any] = {"tokenizer": write_template(tmp_path / "tokenizer", TEMPLATE)}
    options |= {"chat_template": True, "batch_size": 1, "max_prompt_tokens": 2000}
    expected, *others = [prompts(PromptData(path=path, **options)) for path in written]
    assert ["city" in prompt for prompt in expected] == [True, False, False]
    assert others == [expected, expected]
    assert prompts(PromptData.from_rows(datasets.Dataset.from_list(ROWS), **options)) == expected
    options |= {"response_field": "messages", "prompt_field": "question"}
    expected, *others = [prompts(CompletionData(path=path, **options)) for path in written]
    assert ['"city": "1"' in prompt for prompt in expected] == [True, False, False]
    assert others == [expected, expected]


def test_rows_are_those_of_json(written: list[str]) -> None:
    for path in written:
        assert read_rows(path) == ROWS, path


def test_other_nulls_stay() -> None:
    given = {"answer": None, "info": {"a": None, "role": None}, "turns": [{"role": "user", "content": None}]}
    assert without_nulls(given) == given
