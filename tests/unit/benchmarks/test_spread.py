"""What is written beside every number of a benchmark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.spread import machine


def test_a_result_says_when_and_on_which_processor_it_was_measured() -> None:
    found, now = machine(), datetime.now(UTC)
    assert found["date"] in {f"{day:%Y-%m-%d}" for day in (now, now - timedelta(minutes=1))}
    assert found["processor"]
    cpuinfo = Path("/proc/cpuinfo").read_text()
    assert "model name" not in cpuinfo or f": {found['processor']}\n" in cpuinfo
