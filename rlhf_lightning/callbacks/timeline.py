"""The calls of all devices over time, as a file for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlhf_lightning.controller import CallReport

CONTROLLER = "controller"
"""Name of the track with the iterations."""
_MICRO = 1e6


def trace_events(calls: Sequence[CallReport], iterations: Sequence[tuple[float, float]]) -> list[object]:
    """Events of the Trace Event Format: a track for each device, and one for the iterations.

    Args:
        calls: of all devices.
        iterations: of each, the Unix time of its start, and its seconds.
    """
    devices = sorted({call.rank for call in calls})
    names = {0: CONTROLLER, **{1 + device: f"device {device}" for device in devices}}
    events: list[object] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": name}}
        for track, name in names.items()
    ]
    for number, (started, seconds) in enumerate(iterations):
        events.append(_complete(f"iteration {number}", started, seconds, track=0, more={}))
    for call in calls:
        more = {"rows": call.num_rows, "peak_memory_bytes": call.memory_bytes}
        name = f"{call.role}.{call.method}"
        events.append(_complete(name, call.started_s, call.seconds, track=1 + call.rank, more=more))
    return events


def _complete(
    name: str, started: float, seconds: float, *, track: int, more: dict[str, int]
) -> dict[str, object]:
    when = {"ts": started * _MICRO, "dur": seconds * _MICRO}
    return {
        "ph": "X",
        "name": name,
        "cat": name.partition(".")[0],
        "pid": 0,
        "tid": track,
        **when,
        "args": more,
    }


def write_trace(path: Path, calls: Sequence[CallReport], iterations: Sequence[tuple[float, float]]) -> None:
    """Write a file that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": trace_events(calls, iterations), "displayTimeUnit": "ms"}))
