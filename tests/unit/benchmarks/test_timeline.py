"""Idle shares and pictures of calls whose times are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.timeline import draw_timeline, idle_shares
from tests.unit.callbacks.test_timeline import CALLS, ITERATIONS


def test_idle_is_what_no_call_fills() -> None:
    # Device 0 runs 100-102 and 103-105, device 1 102-103 and 103-104.5, of 100-106.
    assert idle_shares(CALLS, ITERATIONS) == pytest.approx({0: 1 - 4 / 6, 1: 1 - 2.5 / 6})
    # A call counts as far as it lies within an iteration.
    assert idle_shares(CALLS, ITERATIONS[1:]) == pytest.approx({0: 0.5, 1: 0.75})


def test_the_picture_names_devices_roles_and_long_calls(tmp_path: Path) -> None:
    path = tmp_path / "new" / "timeline.svg"
    draw_timeline(path, CALLS, title="who ran when")
    text = path.read_text()
    for word in ("device 0", "device 1", "actor", "critic", "who ran when"):
        assert f"<!-- {word} -->" in text
