"""Skips the MLP of a model's last layer for tokens whose outputs are not needed, in training and scoring.

    tokens                     A B C 1 2 3      prompt A B C, response 1 2 3
    outputs that are needed        C 1 2        they predict 1, 2 and 3
    MLP of the last layer          C 1 2

Of A and B the model needs the keys and values only, and the last layer's attention comes before its MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

_WORTH = 0.1
"""Least share of tokens that must be skipped: selecting the others takes time too."""


def needed_tokens(keep: Tensor, *, tokens: int) -> Tensor | None:
    """The positions whose outputs are needed, ascending, each once; None where too few would be skipped.

    Args:
        keep: [K] int64, the positions whose outputs are needed, possibly repeated.
        tokens: number of tokens in the call.
    """
    positions = torch.unique(keep)
    return positions if len(positions) <= (1 - _WORTH) * tokens else None


class PartialMLP:
    """Makes a decoder layer compute its `mlp` only for the tokens `sequences.needed` of a call.

    To the hidden states of the other tokens the layer adds 0.

    Args:
        layer: the last of a model; changed in place.
    """

    def __init__(self, layer: nn.Module) -> None:
        mlp = cast(nn.Module, layer.mlp)
        self._compute, self._needed = mlp.forward, cast(Tensor | None, None)
        layer.register_forward_pre_hook(self._read_needed, with_kwargs=True)
        mlp.forward = self._forward

    def _read_needed(self, layer: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self._needed = getattr(kwargs.get("sequences"), "needed", None)

    def _forward(self, hidden: Tensor) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        if self._needed is None:
            return cast(Tensor, self._compute(hidden))
        found = self._compute(hidden.index_select(1, self._needed))
        return torch.zeros_like(hidden).index_copy(1, self._needed, found)


def shorten_last_mlp(layers: list[nn.Module]) -> None:
    """Change the last of a model's layers, if it has an `mlp`."""
    if layers and isinstance(getattr(layers[-1], "mlp", None), nn.Module):
        PartialMLP(layers[-1])
