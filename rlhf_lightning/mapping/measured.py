"""The file with a run's measurements, one iteration a line; a table of them beside their predictions.

{"hardware": {...}}                    with which the run's seconds were predicted; again after each resume
{"step": 1, "seconds": 2.1, "calls": 6, "phases": [...]}
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_lightning.mapping.fit import Observation
from rlhf_lightning.mapping.hardware import Hardware, build
from rlhf_lightning.mapping.phases import Iteration

FILE = "measurements.jsonl"
"""The file's name in a run's directory."""
_MOST = 20
"""Most iterations that are used, evenly spaced: more would take longer and change nothing."""
_COMMAND = "rlhf fit ... --trainer.callbacks+=PredictedTimes --trainer.default_root_dir"


def begin(path: Path, hardware: Hardware) -> None:
    """Begin the file, or go on after the iterations that it holds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, {"hardware": dataclasses.asdict(hardware)})


def append(path: Path, iteration: Iteration) -> None:
    """Add an iteration."""
    _write(path, dataclasses.asdict(iteration))


def _write(path: Path, values: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def read(run: Path) -> tuple[Hardware, list[Iteration]]:
    """The last hardware and the iterations of a run, without those that begin or resume it, which warm up.

    Args:
        run: the run's directory, or the file.

    Raises:
        ValueError: there is no such file, nothing was measured, or it is damaged.
    """
    path = run / FILE if run.is_dir() else run
    if not path.is_file():
        raise ValueError(
            f"{run}: no measurements are there; a run leaves them in {FILE}. Make one first: {_COMMAND} {run}"
        )
    hardware: Hardware | None = None
    iterations: list[Iteration] = []
    first: set[int] = set()
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            values = json.loads(line)
            if "hardware" in values:
                hardware = build(str(path), values["hardware"])
                first.add(len(iterations))
            else:
                iterations.append(Iteration.of(values))
        except (AttributeError, KeyError, TypeError, ValueError) as err:
            raise ValueError(
                f"{path}, line {number}: is not a measurement ({type(err).__name__}: {err}). Remove the "
                f"line, or measure again: {_COMMAND} {path.parent}"
            ) from err
    if hardware is None or not any(iteration.phases for iteration in iterations):
        raise ValueError(f"{path}: holds no iteration. Run a few: {_COMMAND} {path.parent}")
    warm = [iteration for i, iteration in enumerate(iterations) if i not in first]
    return hardware, warm or iterations


def sample(iterations: Sequence[Iteration]) -> list[Iteration]:
    """At most 20 iterations, evenly spaced."""
    count = min(len(iterations), _MOST)
    return [iterations[len(iterations) * i // count] for i in range(count)]


def observations(iterations: Sequence[Iteration]) -> list[Observation]:
    """The measured seconds of every phase, each with its prediction."""
    phases = [phase for iteration in iterations for phase in iteration.phases]
    return [Observation(phase.name, phase.seconds, phase.predict) for phase in phases]


def table(iterations: Sequence[Iteration], hardware: Hardware) -> str:
    """Medians of measured and predicted seconds by phase, as text."""
    every: dict[str, list[Observation]] = {}
    whole = [Observation("iteration", one.seconds, one.predict) for one in sample(iterations)]
    for one in (*observations(sample(iterations)), *whole):
        every.setdefault(one.name, []).append(one)
    lines = [f"{'seconds an iteration':36s} measured predicted   error ({hardware.name})"]
    for name, seen in every.items():
        measured = statistics.median(one.seconds for one in seen)
        predicted = statistics.median(one.predict(hardware) for one in seen)
        lines.append(f"{name:36s} {measured:8.3f} {predicted:9.3f} {100 * (predicted / measured - 1):+6.0f}%")
    return "\n".join(lines) + "\n"
