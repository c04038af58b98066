"""Copies or averages the weights of one model into another of the same architecture.

A model that generates elsewhere copies the actor's weights parameter by parameter, as vLLM does by itself; a
reference that follows the actor averages them in, from one flat vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from rlhf_lightning.engines.dtensor import local

_ONE_KIND = "Giver and taker must be of one architecture."


class UnfitError(ValueError):
    """Weights are not those that a model needs; the message says which."""


def fitting(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size], *, owner: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the same weights, each checked before.

    Args:
        weights: (name, tensor).
        shapes: the shapes that they must have, by name.
        owner: whose weights they are to become, for the message.

    Raises:
        UnfitError: a weight is of another architecture.
    """
    for name, value in weights:
        shape = shapes.get(name)
        if shape != value.shape:
            has = "no such parameter" if shape is None else tuple(shape)
            raise UnfitError(f"{owner}: was given {name} {tuple(value.shape)} and has {has}. " + _ONE_KIND)
        yield name, value


def copy_weights(stored: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], *, path: str) -> None:
    """Copy the weights of another model.

    Args:
        stored: the whole parameters of this model by name, to write to.
        weights: those of the other; each is valid until the next.
        path: the model's, for messages.

    Raises:
        UnfitError: they are the weights of another architecture.
    """
    missing = dict.fromkeys(stored)
    with torch.no_grad():
        for name, value in fitting(weights, {name: w.shape for name, w in stored.items()}, owner=path):
            stored[name].copy_(value)
            missing.pop(name, None)
    if missing:
        raise UnfitError(f"{path}: was given no {next(iter(missing))}. {_ONE_KIND}")


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
            "Type models of the same architecture, or decay null, with which it stays as it is."
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
