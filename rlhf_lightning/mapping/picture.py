"""A mapping as a picture of one iteration: time to the right, one bar for each pool of devices."""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rlhf_lightning.mapping.plan import Plan
from rlhf_lightning.mapping.report import layout_text
from rlhf_lightning.mapping.search import DeviceMapping, Pool


def draw(plan: Plan, mapping: DeviceMapping, path: Path, *, title: str) -> None:
    """Write a picture of one iteration.

    Args:
        plan: the mapping's.
        mapping: what to draw.
        path: .png, .svg or .pdf.
        title: what was asked for.
    """
    figure = Figure(figsize=(11, 1.6 + 0.9 * len(mapping.pools)), layout="constrained")
    axes = figure.add_subplot()
    colors = dict(zip(plan.costs.dataflow.roles, colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]
    for row, pool in enumerate(mapping.pools):
        _pool(axes, row, plan, mapping, pool=pool, colors=colors)
    _stages(axes, plan, mapping)
    handles = [Patch(color=color) for color in colors.values()]
    figure.legend(handles, list(colors), loc="outside lower center", ncol=len(colors), frameon=False)
    axes.set_yticks(range(len(mapping.pools)), [_label(plan, pool) for pool in mapping.pools])
    axes.invert_yaxis()
    axes.set_xlim(0, mapping.seconds)
    axes.set_xlabel("seconds of one iteration")
    axes.set_title(f"{title}: {plan.tokens_per_s(mapping):,.0f} tokens/s", pad=24)
    figure.savefig(path, dpi=150)


def _label(plan: Plan, pool: Pool) -> str:
    kind = plan.hardware(pool) if len(plan.clusters) > 1 else "devices"
    return f"{pool.devices} {kind}\n{', '.join(pool.roles)}"


def _pool(
    axes: Axes, row: int, plan: Plan, mapping: DeviceMapping, *, pool: Pool, colors: dict[str, object]
) -> None:
    tasks = plan.tasks(pool)
    start = 0.0
    for stage, seconds in zip(plan.stages, mapping.stages, strict=True):
        now = start
        for task in (task for task in tasks if task.stage == stage):
            axes.barh(row, task.seconds, left=now, height=0.7, color=colors[task.role], edgecolor="white")
            if task.seconds > 0.07 * mapping.seconds:
                layout = layout_text(pool.at[task.role], generating=task.work.kind == "generate")
                text = f"{layout.replace(' -> ', chr(10))}\n{task.seconds:.0f} s"
                axes.text(
                    now + task.seconds / 2, row, text, ha="center", va="center", color="white", fontsize=7
                )
            now += task.seconds
        start += seconds


def _stages(axes: Axes, plan: Plan, mapping: DeviceMapping) -> None:
    start = 0.0
    for name, seconds in zip(plan.stages, mapping.stages, strict=True):
        axes.axvline(start, color="0.4", linewidth=0.8, linestyle="--")
        if seconds > 0.04 * mapping.seconds:
            place = axes.get_xaxis_transform()
            axes.text(start + seconds / 2, 1.02, name, transform=place, ha="center", fontsize=8, color="0.3")
        start += seconds
