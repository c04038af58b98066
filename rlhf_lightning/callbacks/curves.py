"""Curves of metrics over the training steps, and pictures of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

Curve = list[tuple[int, float]]
"""Points (step, value), by ascending step."""
_WINDOW = 5
"""Points in the running mean that is drawn over the single values."""


def with_point(curve: Curve, step: int, value: float) -> Curve:
    """The curve with one more point, instead of points at its step and later: steps repeat after a resume."""
    return [*(point for point in curve if point[0] < step), (step, value)]


def read_curve(points: Sequence[Sequence[float]]) -> Curve:
    """A curve from a checkpoint, in which points are lists."""
    return [(int(step), float(value)) for step, value in points]


def draw_curves(curves: Mapping[str, Curve], path: Path, *, unit: str = "") -> None:
    """Draw one line a metric, its running mean, with the single values faint behind it.

    Metrics of `val/`, of which there are few values, are drawn as they are, with marks.

    Args:
        curves: by metric, none of them empty.
        path: of the PNG; its directory is created.
        unit: label of the vertical axis.
    """
    # Imported only to draw; without pyplot there is no global state and no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for i, (name, curve) in enumerate(curves.items()):
        steps, values = [step for step, _ in curve], [value for _, value in curve]
        marker = "o" if name.startswith("val/") else ""
        smooth = values if marker else running_mean(values, _WINDOW)
        axes.plot(steps, values, color=f"C{i}", alpha=0.25, linewidth=1)
        axes.plot(steps, smooth, color=f"C{i}", marker=marker, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """For each value the mean of it and up to `window` - 1 values before it."""
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
