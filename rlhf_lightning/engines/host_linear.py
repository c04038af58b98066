"""Linear layers on a CPU: weights reordered for decoding, and outputs that a generation has computed already.

A decoding step multiplies some tens of tokens by every weight. With weights in oneDNN's own layout, which is
a second copy of them, that runs at 75 to 90 GFLOP/s a core, with torch's layout at 40 to 55.

I is the number of inputs of a layer, O of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear

MANY_TOKENS = 4096
"""From so many tokens on, torch's layout is used: oneDNN's gains less there, and shapes are many."""
_MULTIPLES = {1: 1, 2: 2, 4: 4, 256: 8, MANY_TOKENS: 128}
"""Most tokens -> what their number is padded to a multiple of: oneDNN keeps 0.5 MB for every shape."""
_TYPICAL_TOKENS = 32
"""Number of tokens that oneDNN chooses its layout for."""


class HostLinear(nn.Linear):
    """A linear layer on a CPU, with the parameters of the layer that `use_host_linears` changed."""

    reordered: Tensor | None = None
    """The weight [O, I] in oneDNN's layout, within `reordered_weights`."""
    known_output: Tensor | None = None
    """What the next forward pass returns, [..., O], if it was computed before; gradients are as usual."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if self.known_output is not None:
            apply = cast(Callable[..., Tensor], _KnownOutput.apply)
            return apply(input, self.weight, self.bias, self.known_output)
        if self.reordered is None or input.numel() >= MANY_TOKENS * self.in_features:
            return linear(input, self.weight, self.bias)
        return product(input, self.reordered, self.bias)


class _KnownOutput(torch.autograd.Function):
    """`linear(input, weight, bias)`, which must be equal to `output`: not computed, but differentiable."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, input: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input, the weight and the bias, as far as they are needed."""
        input, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        needed = ctx.needs_input_grad  # type: ignore[attr-defined]
        rows = grad.flatten(0, -2)
        return (
            grad @ weight if needed[0] else None,
            rows.t() @ input.flatten(0, -2) if needed[1] else None,
            rows.sum(0) if needed[2] else None,
            None,
        )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., I] -> [..., O] with a weight [O, I] in either layout."""
    if not weight.is_mkldnn:
        return linear(x, weight, bias)
    tokens = x.shape[-2]
    multiple = next(m for most, m in _MULTIPLES.items() if tokens <= most or most == MANY_TOKENS)
    missing = -tokens % multiple
    padded = torch.constant_pad_nd(x, (0, 0, 0, missing)) if missing else x
    output = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
    return cast(Tensor, output[..., :tokens, :] if missing else output)


def can_reorder(weight: Tensor) -> bool:
    """Whether a weight can be reordered: it is on a CPU that multiplies its dtype with oneDNN."""
    if not weight.is_cpu or not torch.backends.mkldnn.is_available():
        return False
    fast = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or fast


def reordered(weight: Tensor) -> Tensor:
    """A copy of a weight [O, I] in oneDNN's layout, where `can_reorder` allows it."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_TOKENS))


def use_host_linears(model: nn.Module) -> None:
    """Make the linear layers of a model on a CPU `HostLinear`s; nothing where torch has no oneDNN."""
    if torch.backends.mkldnn.is_available():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = HostLinear


@contextmanager
def reordered_weights(model: nn.Module) -> Iterator[None]:
    """Within this context, calls of few tokens use reordered copies of the weights of all `HostLinear`s."""
    layers = [module for module in model.modules() if isinstance(module, HostLinear)]
    layers = [layer for layer in layers if can_reorder(layer.weight)]
    try:
        for layer in layers:
            layer.reordered = reordered(layer.weight)
        yield
    finally:
        for layer in layers:
            layer.reordered = None
