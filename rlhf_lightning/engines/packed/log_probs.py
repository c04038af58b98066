"""Log-probabilities and entropies of tokens from logits, without a float32 copy of all the logits.

Both passes work in chunks of tokens, and the gradient overwrites the logits where nothing else reads them.

K is the number of tokens, V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Logits in a chunk. On a CPU a chunk fits a core's cache: three times as fast as all logits at once."""
_VIEWS = ("SqueezeBackward", "UnsafeViewBackward", "ViewBackward")
"""Autograd nodes of views, without the digits of their names: input and output share memory."""
_OUTPUT_UNUSED = ("MmBackward0", "AddmmBackward0", "_KnownOutputBackward")
"""Autograd nodes that do not read their operation's output in the backward pass."""


def token_log_probs(
    logits: Tensor, targets: Tensor, *, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(logits / temperature), and the distribution's entropy.

    In the backward pass, the gradient overwrites logits that come straight from an output layer.

    Args:
        logits: [K, V], any floating type; the arithmetic is float32.
        targets: [K] int64.
        temperature: divides the logits.
        entropy: whether to compute the entropy; else it is 0.

    Returns:
        log_probs [K] and entropy [K], float32, in nats.
    """
    apply = cast(Callable[..., tuple[Tensor, Tensor]], _TokenLogProbs.apply)
    return apply(logits, targets, 1.0 / temperature, entropy)


def _can_overwrite(logits: Tensor) -> bool:
    """Whether no other backward pass reads the logits: they are no leaf and no output of, say, a softcap."""
    node = logits.grad_fn
    while node is not None and node.name().rstrip("0123456789") in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in _OUTPUT_UNUSED


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, targets: Tensor, scale: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        norms = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        log_probs, entropies = torch.empty_like(norms), torch.zeros_like(norms)
        for part in chunks(logits):
            scaled = times(logits[part], scale)
            tops = scaled.amax(1, keepdim=True)
            shifted = scaled - tops
            chosen = shifted.gather(1, targets[part, None])[:, 0]
            weights = shifted.exp() if entropy else shifted.exp_()
            totals = weights.sum(1)
            norms[part] = tops[:, 0] + totals.log()
            log_probs[part] = chosen - totals.log()
            if entropy:
                entropies[part] = totals.log() - torch.linalg.vecdot(weights, shifted) / totals
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, norms, entropies)
        ctx.scale, ctx.entropy = scale, entropy  # type: ignore[attr-defined]
        ctx.in_place = _can_overwrite(logits)  # type: ignore[attr-defined]
        return log_probs, entropies

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        """Gradients: d log p_t / dx = onehot - p and d H / dx = -p (log p + H), both times the scale.

        An entropy that no loss reads has no gradient (None), and costs nothing here.
        """
        logits, targets, norms, entropies = ctx.saved_tensors  # type: ignore[attr-defined]
        scale: float = ctx.scale  # type: ignore[attr-defined]
        grad_log_probs = torch.zeros_like(norms) if grads[0] is None else grads[0]
        grad_entropies = grads[1] if ctx.entropy else None  # type: ignore[attr-defined]
        out = logits.detach() if ctx.in_place else torch.empty_like(logits)  # type: ignore[attr-defined]
        for part in chunks(logits):
            log_p = times(logits[part], scale) - norms[part, None]
            factor = -scale * grad_log_probs[part, None]
            if grad_entropies is not None:
                factor = factor - scale * grad_entropies[part, None] * (log_p + entropies[part, None])
            grad = log_p.exp_().mul_(factor)
            grad.scatter_add_(1, targets[part, None], scale * grad_log_probs[part, None])
            out[part] = grad
        return out, None, None, None


def times(logits: Tensor, scale: float) -> Tensor:
    """The logits times `scale`, in float32."""
    return logits.float() if scale == 1 else logits.float() * scale


def chunks(logits: Tensor) -> list[slice]:
    """Slices of the tokens, of about `_CHUNK_ELEMENTS` logits each."""
    size = max(1, _CHUNK_ELEMENTS.get(logits.device.type, 1 << 22) // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]
