"""Skips the feed-forward part of the last layer for tokens whose outputs nobody reads.

    tokens                A B C 1 2 3      prompt A B C, response 1 2 3
    outputs that are read     C 1 2        they predict 1, 2 and 3
    last feed-forward         C 1 2

Of A and B only keys and values are needed, which the last layer's attention has computed before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

_WORTH = 0.1
"""Least share of tokens to skip: selecting the others costs something too."""


def spoken(keep: Tensor, *, tokens: int) -> Tensor | None:
    """The places whose outputs are read, in order and each once; None where too few would be skipped.

    Args:
        keep: [K] int64, the places whose outputs are read.
        tokens: number of tokens in the call.
    """
    places = torch.unique(keep)
    return places if len(places) <= (1 - _WORTH) * tokens else None


class Spoken:
    """Makes a decoder layer compute its `mlp` for the tokens `sequences.spoken` only; others get 0 added.

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
