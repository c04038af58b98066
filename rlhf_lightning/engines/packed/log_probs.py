"""Log-probabilities and entropies of tokens, without a second table of the logits' size in float32.

K is the number of tokens, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}
"""On a CPU a chunk and what is made of it stay in the cache of a core: three times as fast as the whole."""
_VIEWS = ("SqueezeBackward", "UnsafeViewBackward", "ViewBackward")
_FREE = ("MmBackward0", "AddmmBackward0", "IndexBackward0", "_KnownBackward")
"""Operations whose output is the same memory, but for the digits of their names; those that keep none."""


def token_log_probs(
    logits: Tensor, targets: Tensor, *, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(logits / temperature), and the distribution's entropy.

    On the way back the gradient takes the place of logits that come straight from an output layer.

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


def _only_ours(logits: Tensor) -> bool:
    """Whether nothing on the way back from logits looks at them: no softcap, and no leaf."""
    node = logits.grad_fn
    while node is not None and node.name().rstrip("0123456789") in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in _FREE


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
        ctx.in_place = _only_ours(logits)  # type: ignore[attr-defined]
        return log_probs, entropies

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        """Gradients: d log p_t / dx = onehot - p and d H / dx = -p (log p + H), both times the scale.

        An entropy that is only looked at has no gradient (None), and costs nothing here.
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
    """Logits in fp32, times `scale`."""
    return logits.float() if scale == 1 else logits.float() * scale


def chunks(logits: Tensor) -> list[slice]:
    """Runs of tokens whose logits in fp32 take little memory."""
    size = max(1, _CHUNK_ELEMENTS.get(logits.device.type, 1 << 22) // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]
