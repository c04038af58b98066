"""Weights on a CPU that are laid out for products with few tokens while a model decodes.

A decoding step multiplies some tens of tokens by every weight: in oneDNN's own layout that runs at 75 to 90
GFLOP/s a core where torch's reaches 40 to 55. The layout is a second copy of the weights. I is the inputs of
a layer, O its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear

FEW = 4096
"""Tokens from which the plain layout is taken: what the other gains is smaller, and shapes are many."""
_STEPS = {1: 1, 2: 2, 4: 4, 256: 8, FEW: 128}
"""Up to so many tokens, they are padded to a multiple: oneDNN keeps half a megabyte for every shape."""
_TYPICAL = 32
"""Tokens that weights are laid out for."""


class HostLinear(nn.Linear):
    """A linear layer that `use_host_linears` has changed: the same parameters."""

    packed: Tensor | None = None
    """The weight [O, I] in oneDNN's layout, while `packed` lasts."""
    known: Tensor | None = None
    """What the next pass is to give, [..., O], where it was computed before; its gradients are as ever."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if self.known is not None:
            return given(input, self.weight, self.bias, self.known)
        if self.packed is None or input.numel() >= FEW * self.in_features:
            return linear(input, self.weight, self.bias)
        return product(input, self.packed, self.bias)


def given(x: Tensor, weight: Tensor, bias: Tensor | None, known: Tensor) -> Tensor:
    """`known`, which is `linear(x, weight, bias)`, with the gradients of that."""
    apply = cast(Callable[..., Tensor], _Known.apply)
    return apply(x, weight, bias, known)


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, input: Tensor, weight: Tensor, bias: Tensor | None, known: Tensor
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        return known.view_as(known)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input, the weight and the bias, as far as they are wanted."""
        input, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        wanted = ctx.needs_input_grad  # type: ignore[attr-defined]
        rows = grad.flatten(0, -2)
        return (
            grad @ weight if wanted[0] else None,
            rows.t() @ input.flatten(0, -2) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
            None,
        )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., I] -> [..., O] with a weight [O, I] in either layout."""
    if not weight.is_mkldnn:
        return linear(x, weight, bias)
    tokens = x.shape[-2]
    missing = -tokens % next(step for most, step in _STEPS.items() if tokens <= most or most == FEW)
    padded = torch.constant_pad_nd(x, (0, 0, 0, missing)) if missing else x
    output = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
    return cast(Tensor, output[..., :tokens, :] if missing else output)


def lays_out(weight: Tensor) -> bool:
    """Whether this machine has products of a weight's type with few tokens, where the weight is."""
    if not weight.is_cpu or not torch.backends.mkldnn.is_available():
        return False
    fast = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or fast


def laid_out(weight: Tensor) -> Tensor:
    """A copy of a weight [O, I] for products with few tokens; `lays_out` says whether there is one."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL))


def use_host_linears(model: nn.Module) -> None:
    """Change the linear layers of a model on a CPU; nothing where torch has no oneDNN."""
    if torch.backends.mkldnn.is_available():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = HostLinear


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Lay the weights of changed layers out for products with few tokens, for a while."""
    layers = [module for module in model.modules() if isinstance(module, HostLinear)]
    layers = [layer for layer in layers if lays_out(layer.weight)]
    try:
        for layer in layers:
            layer.packed = laid_out(layer.weight)
        yield
    finally:
        for layer in layers:
            layer.packed = None
