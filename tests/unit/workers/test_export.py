"""Where an export is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rlhf_lightning.controller import Batch
from rlhf_lightning.controller.register import Caller, Method
from rlhf_lightning.workers import Actor


class Sent(Caller):
    """What a handle has sent."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        self.calls.append((method.name, arguments["directory"]))
        return None


def test_an_export_goes_where_the_controller_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have another working directory, and perhaps another disk."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="Actor is not placed yet"):
        Actor().export(directory=Path("out"))
    assert not Path("out").exists()
    sent = Sent()
    Actor().bound(sent).export(directory=Path("out", "actor"))
    assert sent.calls == [("export_model", tmp_path / "out" / "actor")]
    assert Path("out", "actor").is_dir()
