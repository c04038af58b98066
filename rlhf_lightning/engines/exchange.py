"""Copies or averages the weights of one model into another of the same architecture.

A model that generates elsewhere copies the actor's weights parameter by parameter; a reference that follows
the actor averages them in, from one flat vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from rlhf_lightning.engines.dtensor import local
from rlhf_lightning.engines.huggingface.adapter_files import is_factor
from rlhf_lightning.engines.huggingface.adapters import plain_name


def copy_weights(stored: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], *, path: str) -> None:
    """Copy the weights of another model; adapters are set to 0, so that they add nothing.

    Args:
        stored: the whole parameters of this model by name, to write to.
        weights: those of the other, under their names without adapters; each is valid until the next.
        path: the model's, for messages.

    Raises:
        ValueError: they are the weights of another architecture.
    """
    expected = {plain_name(name): tensor for name, tensor in stored.items() if not is_factor(name)}
    with torch.no_grad():
        for name, value in weights:
            mine = expected.pop(name, None)
            if mine is None or mine.shape != value.shape:
                raise ValueError(
                    f"{path}: was sent {name} {tuple(value.shape)} and has "
                    f"{'no such parameter' if mine is None else tuple(mine.shape)}. Sender and "
                    "receiver must be of one architecture."
                )
            mine.copy_(value)
        for name, tensor in stored.items():
            if is_factor(name):
                tensor.zero_()
    if expected:
        raise ValueError(
            f"{path}: was sent no {next(iter(expected))}. Sender and receiver must be of one architecture."
        )


def flattened(weights: Iterable[Tensor], *, size: int) -> Tensor:
    """Concatenate flattened weights: [size] float32 on the host; with size 0 they are read and dropped."""
    found, at = torch.empty(size), 0
    for weight in weights:
        if size:
            found[at : at + weight.numel()] = weight.detach().flatten()
            at += weight.numel()
    return found


def split_flat(weights: Tensor, sizes: Sequence[int], *, path: str) -> tuple[Tensor, ...]:
    """Split a flat vector of weights into parameters, still flat.

    Args:
        weights: [N], those of another model.
        sizes: numel of each parameter of this model.
        path: this model's, for messages.

    Raises:
        ValueError: they are the weights of another architecture.
    """
    if len(weights) != sum(sizes):
        raise ValueError(
            f"{path}: has {sum(sizes)} weights and cannot follow a model of {len(weights)}. "
            "Type models of the same architecture."
        )
    parts: tuple[Tensor, ...] = weights.split(list(sizes))
    return parts


def average_weights(masters: Mapping[str, Tensor], weights: Tensor, *, decay: float, path: str) -> None:
    """Average in place: decay * own weights + (1 - decay) * those of another model.

    Args:
        masters: parameters by name, whole or sharded, to write to.
        weights: [N] float32 of the other model, in the order of the names.
        decay: share of the own weights, in [0, 1].
        path: of the model, for messages.

    Raises:
        ValueError: they are the weights of another architecture.
    """
    parts = split_flat(weights, [master.numel() for master in masters.values()], path=path)
    with torch.no_grad():
        for master, part in zip(masters.values(), parts, strict=True):
            mine = local(master.detach())
            whole = part.view(master.shape).to(mine.device)
            if isinstance(master, DTensor):
                mesh, placements = master.device_mesh, master.placements
                whole = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
            mine.lerp_(whole, 1 - decay)
