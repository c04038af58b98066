"""Log-probabilities and entropies of tokens whose logits are divided over t tensor ranks by vocabulary.

rank 0: logits of words 0 .. V/t       rank 1: logits of words V/t .. 2 V/t       ...
Ranks exchange four numbers per token and never their logits: the largest logit, the sum of exponentials, the
target's logit, and for the entropy a sum of products.

K is the number of tokens, S = V/t the number of words of a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rlhf_lightning.engines.packed.log_probs import chunks, times, token_log_probs


def parallel_token_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    temperature: float,
    entropy: bool,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """As `token_log_probs`, from logits that the ranks of a group hold in shards of equal size.

    Every rank calls it with the same targets and gets the same results, and in the backward pass the gradient
    of its own logits. All ranks compute the same loss, so no gradient is summed over them.

    Args:
        logits: [K, S], this rank's words, from word rank * S on; any floating type, the arithmetic is
            float32.
        targets: [K] int64, below `vocabulary`.
        vocabulary: number of words; columns beyond them are padding, which has no probability.
        temperature: divides the logits.
        entropy: whether to compute the entropy; else it is 0.
        group: the ranks, in the order of their shards.

    Returns:
        log_probs [K] and entropy [K], float32, in nats.
    """
    size = logits.shape[1]
    first = group.rank() * size
    words = max(0, min(size, vocabulary - first))
    logits = logits[:, :words]
    if group.size() == 1:
        return token_log_probs(logits, targets, temperature=temperature, entropy=entropy)
    apply = cast(Callable[..., tuple[Tensor, Tensor]], _ParallelTokenLogProbs.apply)
    return apply(logits, targets - first, _Options(1.0 / temperature, entropy, group))


class _Options(NamedTuple):
    scale: float
    entropy: bool
    group: dist.ProcessGroup


class _ParallelTokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, places: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
        """`places` [K]: the targets' columns in this shard; outside [0, S) they are another rank's words."""
        scale, entropy, group = options
        words = logits.shape[1]
        tops = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
        sums = tops.new_zeros(3 if entropy else 2, len(logits))
        for part in chunks(logits) if words else ():
            tops[part] = times(logits[part], scale).amax(1)
        _reduce(tops, dist.ReduceOp.MAX, group)
        mine = (places >= 0) & (places < words)
        for part in chunks(logits) if words else ():
            shifted = times(logits[part], scale) - tops[part, None]
            chosen = shifted.gather(1, places[part, None].clamp(0, words - 1))[:, 0]
            sums[1, part] = chosen.where(mine[part], 0.0)
            weights = shifted.exp() if entropy else shifted.exp_()
            sums[0, part] = weights.sum(1)
            if entropy:
                sums[2, part] = torch.linalg.vecdot(weights, shifted)
        _reduce(sums, dist.ReduceOp.SUM, group)
        logs = sums[0].log()
        entropies = logs - sums[2] / sums[0] if entropy else torch.zeros_like(logs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, places, mine, tops + logs, entropies)
        ctx.options = options  # type: ignore[attr-defined]
        return sums[1] - logs, entropies

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        """Gradients as in `log_probs`, each rank for its own words."""
        logits, places, mine, norms, entropies = ctx.saved_tensors  # type: ignore[attr-defined]
        scale, entropy, _ = cast(_Options, ctx.options)  # type: ignore[attr-defined]
        grad_log_probs = torch.zeros_like(norms) if grads[0] is None else grads[0]
        grad_entropies = grads[1] if entropy else None
        out = torch.empty_like(logits)
        words = logits.shape[1]
        for part in chunks(logits) if words else ():
            log_p = times(logits[part], scale) - norms[part, None]
            factor = -scale * grad_log_probs[part, None]
            if grad_entropies is not None:
                factor = factor - scale * grad_entropies[part, None] * (log_p + entropies[part, None])
            grad = log_p.exp_().mul_(factor)
            own = (scale * grad_log_probs[part] * mine[part])[:, None]
            grad.scatter_add_(1, places[part, None].clamp(0, words - 1), own)
            out[part] = grad
        return out, None, None


def _reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    if x.numel():
        dist.all_reduce(x, op=op, group=group)
