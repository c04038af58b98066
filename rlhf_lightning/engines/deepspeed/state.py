"""Saves and loads checkpoints of the DeepSpeed engine, in the format of all engines (`engines.checkpoint`).

Each tensor is gathered on all ranks and written by one of them in turn, half a gigabyte a file, so no rank
holds more of the model than that at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.engines.checkpoint import CheckpointReader, read_state, save_gathered
from rlhf_lightning.engines.deepspeed.masters import Masters
from rlhf_lightning.engines.optimizer import MOMENTS, Counters


def save(directory: Path, masters: Masters, counters: Counters, *, group: dist.ProcessGroup) -> None:
    """Write weights, moments and counters; replaces a checkpoint in the directory. All ranks call it."""
    rank, ranks, seen = dist.get_rank(group), dist.get_world_size(group), masters.moment_steps
    save_gathered(
        directory,
        (
            {name: values.cpu()} if number % ranks == rank else {}
            for number, (name, values) in enumerate(_collected(masters))
        ),
        counters.state({} if seen is None else dict.fromkeys(masters.shapes, seen)),
        shapes={f"{kind}.{n}": shape for kind in _kinds(masters) for n, shape in masters.shapes.items()},
        rank=rank,
        wait=partial(dist.barrier, group),
    )


def load(directory: Path, masters: Masters, counters: Counters, *, trained: bool) -> None:
    """Fill masters and counters, and moments if `trained`; each rank reads one tensor at a time.

    Raises:
        ValueError: there is no complete checkpoint, or it is of another model.
    """
    state = read_state(directory, {f"model.{name}": shape for name, shape in masters.shapes.items()})
    restored = counters.restore(state, known=masters.shapes)
    moments = restored if trained else {}
    masters.make_moments(max(moments.values(), default=None))
    reader = CheckpointReader(directory)
    for name, shape in masters.shapes.items():
        kinds: dict[str, str | None] = {f"model.{name}": None}
        kinds |= {f"{moment}.{name}": moment for moment in MOMENTS if name in moments}
        tensors = {key: torch.empty(shape) for key in kinds}
        reader.fill(tensors)
        for key, moment in kinds.items():
            masters.write(name, tensors[key], moment)


def _collected(masters: Masters) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by name, one after the other, on every rank."""
    for kind, name in product(_kinds(masters), masters.shapes):
        yield f"{kind}.{name}", masters.read(name, None if kind == "model" else kind)


def _kinds(masters: Masters) -> tuple[str, ...]:
    return ("model",) if masters.moment_steps is None else ("model", *MOMENTS)
