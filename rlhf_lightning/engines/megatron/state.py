"""Saves and loads checkpoints of the Megatron engine, in the format of all engines (`engines.checkpoint`).

The ranks gather whole tensors one after the other, share out the writing, and write half a gigabyte a file,
so no rank holds more of the model than that at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby, product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.engines.checkpoint import CheckpointReader, read_state, save_gathered
from rlhf_lightning.engines.megatron.optimizer import ShardedAdamW
from rlhf_lightning.engines.megatron.weights import Weights
from rlhf_lightning.engines.optimizer import MOMENTS
from rlhf_lightning.parallel.world import Seat


def save(directory: Path, weights: Weights, optimizer: ShardedAdamW, *, seat: Seat) -> None:
    """Write weights, moments and counters; replaces a checkpoint in the directory. All ranks call it."""
    wanted, steps = seat.layout.coordinate(seat.rank).d == 0, optimizer.moment_steps
    kinds = ["model", *(MOMENTS if steps is not None else ())]
    save_gathered(
        directory,
        # Clones, since safetensors refuses views of one tensor, as the parts of a fused one are.
        (
            {name: tensor.clone() for name, tensor in found.items()} if wanted else {}
            for found in _collected(weights, optimizer, seat=seat)
        ),
        optimizer.counters.state({} if steps is None else dict.fromkeys(weights.shapes, steps)),
        shapes={f"{kind}.{name}": shape for kind in kinds for name, shape in weights.shapes.items()},
        rank=seat.rank,
        wait=partial(wait, seat),
    )


def load(directory: Path, weights: Weights, optimizer: ShardedAdamW, *, trained: bool) -> None:
    """Continue from a checkpoint; each rank reads what it needs, and the moments only if `trained`.

    Raises:
        ValueError: there is no complete checkpoint, or it is of another model.
    """
    state = read_state(directory, {f"model.{name}": shape for name, shape in weights.shapes.items()})
    restored = optimizer.counters.restore(state, known=weights.shapes)
    moments = restored if trained else {}
    optimizer.make_moments(max(moments.values(), default=None))
    kinds: dict[str, str | None] = {"model": None, **{moment: moment for moment in MOMENTS if moments}}
    reader = CheckpointReader(directory)
    for _, group in groupby(weights.held, key=lambda param: param.place):
        params = list(group)
        names = [name for param in params for name in weights.conversion.names(param.name)]
        tensors = {f"{kind}.{name}": torch.empty(weights.shapes[name]) for kind in kinds for name in names}
        reader.fill(tensors)
        for param, (kind, moment) in product(params, kinds.items()):
            read = {name: tensors[f"{kind}.{name}"] for name in weights.conversion.names(param.name)}
            weights.fill(param, read.__getitem__, moment)


def _collected(weights: Weights, optimizer: ShardedAdamW, *, seat: Seat) -> Iterator[dict[str, Tensor]]:
    """Whole tensors by name; those of a stage are gathered on its tensor ranks in turn."""
    at = seat.layout.coordinate(seat.rank)
    kinds = [("model", None), *((moment, moment) for moment in MOMENTS if optimizer.moment_steps is not None)]
    for number, param in enumerate(weights.held):
        for kind, moment in kinds if weights.owner(param) == at.p else ():
            shard = optimizer.read(param.name, moment)
            found = weights.collect(param, shard, target=number % seat.layout.t)
            yield {f"{kind}.{name}": value.contiguous().cpu() for name, value in found.items()}


def wait(seat: Seat) -> None:
    """A barrier of all ranks of the model: within each replica, then over the replicas."""
    assert seat.groups is not None
    for group in (seat.groups.replica, seat.groups.data):
        dist.barrier(group)
