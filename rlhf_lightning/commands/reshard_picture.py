"""A picture of a reshard plan: the model from left to right, a line for each rank."""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rlhf_lightning.commands.blocks import MEANING, Blocks
from rlhf_lightning.parallel.reshard import ReshardPlan

_TAB = colormaps["tab10"].colors  # type: ignore[attr-defined]
COLORS = {"kept": _TAB[0], "received": _TAB[2], "redundant": _TAB[3], "dropped": "0.85"}


def draw(plan: ReshardPlan, path: Path, *, title: str) -> None:
    """Write a picture of a plan.

    Args:
        plan: for a model of which only the size is known.
        path: .png, .svg or .pdf.
        title: what was asked for.
    """
    blocks, layout = Blocks(plan), plan.layout
    figure = Figure(figsize=(9, 1.6 + 0.3 * layout.num_ranks), layout="constrained")
    axes = figure.add_subplot()
    for part in plan.ranks:
        for block in blocks.of(part):
            width = float(block.stop - block.start)
            axes.barh(part.rank, width, left=float(block.start), height=0.8, color=COLORS[block.kind])
    cells = layout.p * layout.t
    for cell in range(1, cells):
        axes.axvline(cell / cells, color="white", linewidth=0.6)
    for group in range(cells, layout.num_ranks, cells):
        axes.axhline(group - 0.5, color="0.4", linewidth=0.8)
    handles = [Patch(color=COLORS[kind]) for kind in MEANING]
    figure.legend(handles, list(MEANING.values()), loc="outside lower center", ncol=4, frameon=False)
    axes.set_yticks(range(layout.num_ranks), [f"rank {rank}" for rank in range(layout.num_ranks)], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    stages = [f"stage {p}" if layout.p > 1 else "the model" for p in range(layout.p)]
    axes.set_xticks([(p + 0.5) / layout.p for p in range(layout.p)], stages)
    axes.set_title(title)
    figure.savefig(path, dpi=150)
