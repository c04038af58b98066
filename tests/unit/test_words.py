"""Words of a command line that are taken as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_lightning.names import class_path
from rlhf_lightning.words import read_config


def test_a_class_may_have_options_that_its_signature_does_not_name(tmp_path: Path) -> None:
    """As jsonargparse writes and reads those of `**kwargs`, and `--print_config` gives them."""
    path, data = tmp_path / "mine.yaml", {"class_path": "a.B", "init_args": {"c": 1}, "dict_kwargs": {"d": 2}}
    path.write_text(json.dumps({"data": data}), encoding="utf-8")
    assert json.loads(read_config(str(path)))["data"] == data


def test_a_file_of_the_name_of_a_kind_hides_it_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taskdata").touch()
    assert class_path("data", "taskdata") == "rlhf_lightning.data.TaskData"
    Path("rows").touch()
    with pytest.raises(ValueError, match="--data rows: is a file"):
        class_path("data", "rows")
