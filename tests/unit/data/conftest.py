"""Files of rows that the tests of the data read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Writer = Callable[..., Path]


@pytest.fixture
def write_rows(tmp_path: Path) -> Writer:
    """Write rows as JSON Lines and return the file."""

    def write(*rows: object, name: str = "train.jsonl") -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    return write


@pytest.fixture
def numbered(write_rows: Writer) -> Callable[[int], Path]:
    """Write n rows with the prompts p0, p1, ... and the responses r0, r1, ..."""
    return lambda count: write_rows(*({"prompt": f"p{i}", "response": f"r{i}"} for i in range(count)))
