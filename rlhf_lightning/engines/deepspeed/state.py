"""Checkpoints in the files of the other engines: whole tensors, which the ranks share out among them.

A tensor is gathered on all ranks and written by one, half a gigabyte a file, so that none holds more of the
model than that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rlhf_lightning.engines.checkpoint import _FILE, _FILE_BYTES, _SHAPES, load_checkpoint, read_state
from rlhf_lightning.engines.deepspeed.masters import MOMENTS, Masters


@dataclass
class Counters:
    """Optimizer steps so far."""

    steps: int = 0
    skipped_steps: int = 0


def save(directory: Path, masters: Masters, counters: Counters, *, group: dist.ProcessGroup) -> None:
    """Write weights, moments and counters over a checkpoint that stands there; all ranks call it."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _FILE).unlink(missing_ok=True)
        for stale in directory.glob("shard-*.safetensors"):
            stale.unlink()
    dist.barrier(group)
    tensors: dict[str, Tensor] = {}
    files = 0
    for number, (name, values) in enumerate(_collected(masters)):
        tensors |= {name: values.cpu()} if number % ranks == rank else {}
        if sum(tensor.nbytes for tensor in tensors.values()) >= _FILE_BYTES:
            files, tensors = files + 1, _written(directory, rank, files + 1, tensors)
    if tensors:
        _written(directory, rank, files + 1, tensors)
    dist.barrier(group)
    if rank == 0:
        text = json.dumps(_described(masters, counters), indent=1)
        (directory / _FILE).write_text(text, encoding="utf-8")
    dist.barrier(group)


def load(directory: Path, masters: Masters) -> Counters:
    """Fill masters and moments from a checkpoint; each rank reads tensor by tensor and keeps its piece.

    Raises:
        ValueError: there is no complete checkpoint, or it is of another model.
    """
    empty = {f"model.{name}": torch.empty(shape, device="meta") for name, shape in masters.shapes.items()}
    state = read_state(directory, empty)
    steps, skipped, moments = (state.get(key) for key in ("steps", "skipped_steps", "moment_steps"))
    if not (isinstance(steps, int) and isinstance(skipped, int) and isinstance(moments, dict)):
        raise ValueError(
            "optimizer state: steps, skipped_steps or moment_steps is missing. Type a checkpoint."
        )
    if unknown := sorted(set(moments) - set(masters.shapes)):
        raise ValueError(f"optimizer state: of another model, this one has no {unknown[0]}.")
    masters.make_moments(max(moments.values(), default=None))
    for name, shape in masters.shapes.items():
        kinds: dict[str, str | None] = {f"model.{name}": None}
        kinds |= {f"{moment}.{name}": moment for moment in MOMENTS if name in moments}
        tensors = {key: torch.empty(shape) for key in kinds}
        load_checkpoint(directory, tensors, group=None)
        for key, moment in kinds.items():
            masters.write(name, tensors[key], moment)
    return Counters(steps, skipped)


def _collected(masters: Masters) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors, one after the other, on every rank."""
    for kind, name in product(_kinds(masters), masters.shapes):
        yield f"{kind}.{name}", masters.read(name, None if kind == "model" else kind)


def _kinds(masters: Masters) -> tuple[str, ...]:
    return ("model",) if masters.moment_steps is None else ("model", *MOMENTS)


def _written(directory: Path, rank: int, number: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write a file; returns what is left to write, nothing."""
    save_file(dict(tensors), directory / f"shard-{rank + 1:05d}-model-{number:05d}.safetensors")
    return {}


def _described(masters: Masters, counters: Counters) -> dict[str, object]:
    """The counters, and the names and shapes of all tensors of all ranks."""
    seen = masters.moment_steps
    return {
        "steps": counters.steps,
        "skipped_steps": counters.skipped_steps,
        "moment_steps": {} if seen is None else dict.fromkeys(masters.shapes, seen),
        _SHAPES: {
            f"{kind}.{n}": list(shape) for kind in _kinds(masters) for n, shape in masters.shapes.items()
        },
    }
