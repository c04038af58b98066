"""Which device ran what when: shares of idle time, and a picture."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rlhf_lightning.controller import CallReport


def idle_shares(calls: Sequence[CallReport], iterations: Sequence[tuple[float, float]]) -> dict[int, float]:
    """For each device the share of the iterations' time in which it ran no call.

    Waiting within a call, for other ranks or for weights, counts as running.
    """
    whole = sum(seconds for _, seconds in iterations)
    busy: defaultdict[int, float] = defaultdict(float)
    for call in calls:
        for started, seconds in iterations:
            end = min(call.started_s + call.seconds, started + seconds)
            busy[call.rank] += max(0.0, end - max(call.started_s, started))
    return {device: 1 - seconds / whole for device, seconds in sorted(busy.items())}


def draw_timeline(path: Path, calls: Sequence[CallReport], *, title: str = "") -> None:
    """Draw the calls of an iteration, a row a device, time to the right.

    Args:
        path: .png, .svg or .pdf; its directory is made.
        calls: at least one.
        title: above the picture.
    """
    # Imported by those who draw; without pyplot there is no global state and no display.
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    devices = sorted({call.rank for call in calls})
    roles = sorted({call.role for call in calls})
    start = min(call.started_s for call in calls)
    figure = Figure(figsize=(9, 1.2 + 0.5 * len(devices)), layout="constrained")
    axes = figure.add_subplot()
    colors = dict(zip(roles, colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]
    longest = max(call.started_s + call.seconds for call in calls) - start
    for call in calls:
        row, left = devices.index(call.rank), call.started_s - start
        axes.barh(row, call.seconds, left=left, color=colors[call.role], edgecolor="white", linewidth=0.5)
        if call.seconds > 0.06 * longest:
            name = call.method.replace("_", "\n", 1)
            axes.text(left + call.seconds / 2, row, name, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(len(devices)), [f"device {device}" for device in devices])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title)
    handles = [Patch(color=colors[role]) for role in roles]
    figure.legend(handles, roles, loc="outside lower center", ncol=len(roles), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
