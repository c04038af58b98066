"""Linear layers on a CPU in float32, computed by oneDNN, which beats torch's own choice of a library there.

    many tokens (training, scoring, prompts)    products by oneDNN, forward and backward
    few (a decoding step)                       the same from weights laid out for it, while `packed` lasts

T is the number of tokens, I the inputs of a layer, O its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

_MANY = 256
"""Tokens from which a product is worth the way into oneDNN."""
_FEW = 32
"""Tokens that packed weights are laid out for."""
_ROUNDING = 1e-5
"""Largest error of a product that counts as float32, over the largest number."""


class _Precision(Protocol):
    fp32_precision: str


class _Kernels(Protocol):
    matmul: _Precision


class HostLinear(nn.Linear):
    """A linear layer that `use_host_linears` has changed: the same parameters, other kernels."""

    packed: Tensor | None = None
    """The weight [O, I] in oneDNN's layout, while `packed` lasts."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if input.dtype != torch.float32 or isinstance(self.weight, DTensor):
            return linear(input, self.weight, self.bias)
        if input.numel() >= _MANY * self.in_features:
            return cast(Callable[..., Tensor], _Product.apply)(input, self.weight, self.bias)
        if self.packed is None:
            return linear(input, self.weight, self.bias)
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], ""))


def use_host_linears(model: nn.Module) -> None:
    """Change the linear layers of a model on a CPU; nothing where oneDNN is absent or rounds."""
    if _exact():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = HostLinear


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Lay the weights of changed layers out for products with few tokens, for a while: one more copy."""
    layers = [module for module in model.modules() if isinstance(module, HostLinear)]
    layers = [layer for layer in layers if layer.weight.dtype == torch.float32]
    try:
        for layer in layers:
            layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _FEW)
        yield
    finally:
        for layer in layers:
            layer.packed = None


@contextmanager
def _by_onednn() -> Iterator[None]:
    """Let oneDNN compute products: torch asks it where bfloat16 would do, and `_exact` says it is kept."""
    matmul = _matmul()
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _matmul() -> _Precision:
    """How torch's products on a CPU are computed."""
    return cast(_Kernels, torch.backends.mkldnn).matmul


@cache
def _exact() -> bool:
    """Whether oneDNN is there, and keeps float32 on this CPU."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.backends.mkldnn, "matmul"):
        return False
    numbers = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(_MANY, _MANY, generator=numbers) for _ in range(2))
    with _by_onednn():
        found = linear(x, weight)
    exact = linear(x.double(), weight.double())
    return float((found - exact).abs().max()) <= _ROUNDING * float(exact.abs().max())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`linear` of x [..., I]."""
        ctx.save_for_backward(x, weight)
        with _by_onednn():
            return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of what needs one."""
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        of_x, of_weight, of_bias = ctx.needs_input_grad  # type: ignore[attr-defined]
        flat, rows = grads[0].flatten(0, -2), x.flatten(0, -2)
        with _by_onednn():
            found = grads[0] @ weight if of_x else None
            # In this order the product is the faster one by a tenth.
            turned = (rows.t() @ flat).t() if of_weight else None
        return found, turned, flat.sum(0) if of_bias else None
