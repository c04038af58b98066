"""Checks that weights fit the model in vLLM, which says nothing where one is too large, or missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from rlhf_lightning.engines.huggingface.models import empty_model, read_config
from rlhf_lightning.spec import ModelSpec


class UnfitError(ValueError):
    """Weights are not those that the model in vLLM needs; the message says which."""


def weight_shapes(model: ModelSpec) -> dict[str, torch.Size]:
    """The shape of every parameter by its Hugging Face name, with that of a tied output layer."""
    module = empty_model(read_config(model), "lm")
    return {name: weight.shape for name, weight in module.named_parameters(remove_duplicate=False)}


def needed(model: nn.Module) -> set[str]:
    """Names of what a model in vLLM must be given: its parameters, and its buffers that would be in files.

    vLLM fills both at random. Names that begin with an underscore are its own: scales of keys and values.
    """
    buffers = model.state_dict().keys() & dict(model.named_buffers()).keys()
    own = {name for name in buffers if name.rpartition(".")[2].startswith("_")}
    return dict(model.named_parameters()).keys() | buffers - own


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
            raise UnfitError(
                f"{owner}: was given {name} {tuple(value.shape)} and has {has}. "
                "Giver and taker must be of one architecture."
            )
        yield name, value
