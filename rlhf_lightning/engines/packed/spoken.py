"""The feed-forward part of the last layer, for those tokens alone whose outputs are read.

    tokens                A B C 1 2 3
    read, what comes next     1 2 3        as C, 1 and 2 say
    last feed-forward         C 1 2

A and B of the prompt are attended to, and that is all they are there for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

_WORTH = 0.1
"""Least share of tokens left out for which they are: taking the others apart costs something too."""


def spoken(keep: Tensor, *, tokens: int) -> Tensor | None:
    """The places that are read, in order and each once; None where too few of `tokens` would be left out.

    Args:
        keep: [K] int64, the places whose outputs are read.
        tokens: of the call.
    """
    places = torch.unique(keep)
    return places if len(places) <= (1 - _WORTH) * tokens else None


class Spoken:
    """Has a decoder layer compute its `mlp` for `sequences.spoken` alone; the others get 0 added.

    Args:
        layer: the last of a model; changed in place.
    """

    def __init__(self, layer: nn.Module) -> None:
        mlp = cast(nn.Module, layer.mlp)
        self._compute, self._places = mlp.forward, cast(Tensor | None, None)
        layer.register_forward_pre_hook(self._look, with_kwargs=True)
        mlp.forward = self._forward

    def _look(self, layer: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self._places = getattr(kwargs.get("sequences"), "spoken", None)

    def _forward(self, hidden: Tensor) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        if self._places is None:
            return cast(Tensor, self._compute(hidden))
        found = self._compute(hidden.index_select(1, self._places))
        return torch.zeros_like(hidden).index_copy(1, self._places, found)


def speak_last(layers: list[nn.Module]) -> None:
    """Change the last of a model's layers, if it has an `mlp`."""
    if layers and isinstance(getattr(layers[-1], "mlp", None), nn.Module):
        Spoken(layers[-1])
