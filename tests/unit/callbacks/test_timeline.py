"""Traces of calls whose times are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_lightning.callbacks.timeline import write_trace
from rlhf_lightning.controller import CallReport


def call(role: str, method: str, device: int, started_s: float, seconds: float) -> CallReport:
    return CallReport(role, method, device, started_s, seconds, 1000 + device, None, num_rows=8)


CALLS = (
    call("actor", "generate_sequences", 0, 100.0, 2.0),
    call("critic", "compute_values", 1, 102.0, 1.0),
    call("actor", "update_actor", 0, 103.0, 2.0),
    call("critic", "update_critic", 1, 103.0, 1.5),
)
ITERATIONS = ((100.0, 4.0), (104.0, 2.0))


def test_a_trace_has_a_track_for_each_device_and_one_for_the_iterations(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    write_trace(path, CALLS, ITERATIONS)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "controller", 1: "device 0", 2: "device 1"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [(s["name"], s["tid"]) for s in spans[:2]] == [("iteration 0", 0), ("iteration 1", 0)]
    update = next(span for span in spans if span["name"] == "critic.update_critic")
    assert (update["tid"], update["ts"], update["dur"]) == (2, 103.0e6, 1.5e6)
    assert update["args"] == {"rows": 8, "peak_memory_bytes": 1001}


def test_a_full_disk_is_that_of_the_trace() -> None:
    """Else it would be taken for that of the checkpoints."""
    with pytest.raises(OSError, match="No space left") as caught:
        write_trace(Path("/dev/full"), CALLS, ITERATIONS)
    assert caught.value.filename == "/dev/full"
