"""The calls of all devices over time, as a file for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_lightning.controller import CallReport
from rlhf_lightning.output import named

CONTROLLER = "controller"
"""Name of the track with the iterations."""
_MICRO = 1e6


def trace_events(
    calls: Sequence[CallReport], iterations: Sequence[tuple[float, float]]
) -> Iterator[dict[str, object]]:
    """Events of the Trace Event Format: a track for each device, and one for the iterations.

    Args:
        calls: of all devices.
        iterations: of each, the Unix time of its start, and its seconds.
    """
    devices = sorted({call.rank for call in calls})
    names = {0: CONTROLLER, **{1 + device: f"device {device}" for device in devices}}
    for track, name in names.items():
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": name}}
    for number, (started, seconds) in enumerate(iterations):
        yield _complete(f"iteration {number}", started, seconds, track=0, more={})
    for call in calls:
        more = {"rows": call.num_rows, "peak_memory_bytes": call.memory_bytes}
        name = f"{call.role}.{call.method}"
        yield _complete(name, call.started_s, call.seconds, track=1 + call.rank, more=more)


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
    """Write a file that Perfetto (ui.perfetto.dev) and chrome://tracing open, event by event.

    Raises:
        OSError: it cannot be written; the file name is `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with named(path), path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(trace_events(calls, iterations)):
            file.write(",\n" * (number > 0) + json.dumps(event))
        file.write("\n]}\n")
