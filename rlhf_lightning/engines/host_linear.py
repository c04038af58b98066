"""Linear layers on a CPU whose weights are laid out for products with few tokens while a model decodes.

A decoding step multiplies some tens of tokens by every weight: in oneDNN's own layout that runs at 75 to 90
GFLOP/s a core where torch's reaches 40 to 55. The layout is a second copy of the weights, for as long as
`packed` lasts. I is the inputs of a layer, O its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

_MOST = 256
"""Tokens from which the plain layout is as fast."""
_STEP = 8
"""Tokens are padded to a multiple of this: oneDNN keeps half a megabyte for every shape it meets."""
_TYPICAL = 32
"""Tokens that weights are laid out for."""


class HostLinear(nn.Linear):
    """A linear layer that `use_host_linears` has changed: the same parameters."""

    packed: Tensor | None = None
    """The weight [O, I] in oneDNN's layout, while `packed` lasts."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if self.packed is None or input.numel() >= _MOST * self.in_features:
            return linear(input, self.weight, self.bias)
        tokens = input.shape[-2]
        padded = pad(input, (0, 0, 0, -tokens % _STEP)) if tokens % _STEP else input
        output = torch.ops.mkldnn._linear_pointwise(padded, self.packed, self.bias, "none", [], "")
        return cast(Tensor, output[..., :tokens, :])


def use_host_linears(model: nn.Module) -> None:
    """Change the linear layers of a model on a CPU; nothing where torch has no oneDNN."""
    if torch.backends.mkldnn.is_available():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = HostLinear


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Lay the float32 weights of changed layers out for products with few tokens, for a while."""
    layers = [module for module in model.modules() if isinstance(module, HostLinear)]
    layers = [layer for layer in layers if layer.weight.dtype == torch.float32]
    try:
        for layer in layers:
            layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _TYPICAL)
        yield
    finally:
        for layer in layers:
            layer.packed = None
