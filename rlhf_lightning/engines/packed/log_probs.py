"""Log-probabilities and entropies of tokens from logits, without a float32 copy of all the logits.

Both passes work in chunks of tokens, and the gradient overwrites the logits where nothing else reads them.

Logits may be divided over t tensor ranks by vocabulary:

rank 0: logits of words 0 .. V/t       rank 1: logits of words V/t .. 2 V/t       ...

Ranks exchange a few numbers per token and never their logits: the largest logit, the sum of exponentials, the
logits of the words in question, and for the entropy a sum of products.

K is the number of tokens, V the size of the vocabulary, S = V/t the number of words of a shard, C the number
of words in question: the token that was said and, where they are asked for, candidates for its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import pad

_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Logits in a chunk. On a CPU a chunk fits a core's cache: three times as fast as all logits at once."""
_VIEWS = ("SqueezeBackward", "UnsafeViewBackward", "ViewBackward")
"""Autograd nodes of views, without the digits of their names: input and output share memory."""
_OUTPUT_UNUSED = ("MmBackward0", "AddmmBackward0", "_KnownOutputBackward")
"""Autograd nodes that do not read their operation's output in the backward pass."""


def token_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    temperature: float,
    entropy: bool,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target in softmax(logits / temperature), and the distribution's entropy.

    In the backward pass, the gradient overwrites logits that come straight from an output layer. All ranks of
    a group call it with the same targets and get the same results, and in the backward pass each the gradient
    of its own logits. They compute the same loss, so no gradient is summed over them.

    Args:
        logits: [K, S], this rank's words, from word rank * S on; any floating type, the arithmetic is
            float32.
        targets: [K, C] int64, below `vocabulary`.
        vocabulary: number of words; columns beyond them are padding, which has no probability.
        temperature: divides the logits.
        entropy: whether to compute the entropy; else it is 0.
        group: ranks that hold the logits in shards of equal size, in the order of their shards; None: this
            rank has all.

    Returns:
        log_probs [K, C] and entropy [K], float32, in nats.
    """
    logits, first = _own_words(logits, vocabulary, group)
    options = _Options(1.0 / temperature, entropy)
    if group is not None and group.size() > 1:
        targets = targets - first
        mine = (targets >= 0) & (targets < logits.shape[1])
        targets, options = targets.where(mine, 0), options._replace(shard=_Shard(group, mine))
    apply = cast(Callable[..., tuple[Tensor, Tensor]], _TokenLogProbs.apply)
    return apply(logits, targets, options)


def likeliest_words(
    logits: Tensor, count: int, *, vocabulary: int, group: dist.ProcessGroup | None
) -> Tensor:
    """The words with the largest logits, the likeliest first: [K, count] int64, the same on all ranks.

    Args:
        logits: [K, S], as for `token_log_probs`.
        count: how many; at most `vocabulary`.
        vocabulary: see there.
        group: see there.

    Raises:
        ValueError: there are fewer words.
    """
    if count > vocabulary:
        raise ValueError(f"{count} of the likeliest words are wanted of a model that has {vocabulary}.")
    logits, first = _own_words(logits, vocabulary, group)
    values, words = logits.topk(min(count, logits.shape[1]), dim=1)
    if group is None or group.size() == 1:
        return words
    room = (0, count - words.shape[1])
    mine = pad(values.float(), room, value=-torch.inf), pad(words + first, room)
    every = [[torch.empty_like(x) for _ in range(group.size())] for x in mine]
    for x, parts in zip(mine, every, strict=True):
        dist.all_gather(parts, x, group=group)
    best = torch.cat(every[0], 1).topk(count, dim=1).indices
    return torch.cat(every[1], 1).gather(1, best)


def _own_words(logits: Tensor, vocabulary: int, group: dist.ProcessGroup | None) -> tuple[Tensor, int]:
    """A shard's logits without padding, and the number of its first word."""
    first = 0 if group is None else group.rank() * logits.shape[1]
    words = max(0, min(logits.shape[1], vocabulary - first))
    # A slice, even of all words, is another reader of the logits, whose memory the gradient could not take.
    return (logits if words == logits.shape[1] else logits[:, :words]), first


class _Shard(NamedTuple):
    """What ranks must know whose logits are those of a part of the words."""

    group: dist.ProcessGroup
    mine: Tensor
    """[K, C] bool, whether a target is among this rank's words; its place is 0 where it is not."""


class _Options(NamedTuple):
    scale: float
    """Multiplies the logits."""
    entropy: bool
    shard: _Shard | None = None
    """None: the logits are those of all words."""


def _can_overwrite(logits: Tensor) -> bool:
    """Whether no other backward pass reads the logits: they are no leaf and no output of, say, a softcap."""
    node = logits.grad_fn
    while node is not None and node.name().rstrip("0123456789") in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in _OUTPUT_UNUSED


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, places: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
        """`places` [K, C]: the targets' columns. All sums are of logits less the token's largest."""
        scale, entropy, shard = options
        tops = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
        words = places.shape[1]
        sums = tops.new_zeros(1 + words + entropy, len(logits))  # exponentials, targets' logits, products
        for part in chunks(logits):
            scaled = times(logits[part], scale)
            tops[part] = scaled.amax(1)
            shifted = scaled - tops[part, None]
            sums[1 : 1 + words, part] = shifted.gather(1, places[part]).T
            weights = shifted.exp() if entropy else shifted.exp_()
            sums[0, part] = weights.sum(1)
            if entropy:
                sums[-1, part] = torch.linalg.vecdot(weights, shifted)
        if shard is not None:
            tops, sums = _joined(tops, sums, shard)
        logs = sums[0].log()
        entropies = logs - sums[-1] / sums[0] if entropy else torch.zeros_like(logs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, places, tops + logs, entropies)
        ctx.options = options  # type: ignore[attr-defined]
        ctx.in_place = _can_overwrite(logits)  # type: ignore[attr-defined]
        return (sums[1 : 1 + words] - logs).T, entropies

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        """Gradients: d log p_t / dx = onehot - p and d H / dx = -p (log p + H), both times the scale.

        A rank with a shard has those of its own words.
        An entropy that no loss reads has no gradient (None), and costs nothing here.
        """
        logits, places, norms, entropies = ctx.saved_tensors  # type: ignore[attr-defined]
        scale, entropy, shard = cast(_Options, ctx.options)  # type: ignore[attr-defined]
        grad_log_probs = norms.new_zeros(places.shape) if grads[0] is None else grads[0]
        grad_targets = scale * (grad_log_probs if shard is None else grad_log_probs * shard.mine)
        grad_sums, grad_entropies = grad_log_probs.sum(1), grads[1] if entropy else None
        out = logits.detach() if ctx.in_place else torch.empty_like(logits)  # type: ignore[attr-defined]
        for part in chunks(logits):
            log_p = times(logits[part], scale) - norms[part, None]
            factor = -scale * grad_sums[part, None]
            if grad_entropies is not None:
                factor = factor - scale * grad_entropies[part, None] * (log_p + entropies[part, None])
            grad = log_p.exp_().mul_(factor)
            grad.scatter_add_(1, places[part], grad_targets[part])
            out[part] = grad
        return out, None, None


def _joined(tops: Tensor, sums: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
    """The tops and sums over all words, from those over this shard's words."""
    whole = tops.clone()
    _reduce(whole, dist.ReduceOp.MAX, shard.group)
    gaps = (tops - whole).clamp(min=torch.finfo(torch.float32).min)  # a shard of padding has no top: -inf
    totals, chosen, products = sums.split((1, shard.mine.shape[1], len(sums) - 1 - shard.mine.shape[1]))
    chosen = (chosen + gaps).where(shard.mine.T, 0.0)
    added = torch.cat([totals * gaps.exp(), chosen, (products + gaps * totals) * gaps.exp()])
    _reduce(added, dist.ReduceOp.SUM, shard.group)
    return whole, added


def _reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    if x.numel():
        dist.all_reduce(x, op=op, group=group)


def times(logits: Tensor, scale: float) -> Tensor:
    """The logits times `scale`, in float32."""
    return logits.float() if scale == 1 else logits.float() * scale


def chunks(logits: Tensor) -> list[slice]:
    """Slices of the tokens, of about `_CHUNK_ELEMENTS` logits each; none of a shard without words."""
    if not logits.numel():
        return []
    size = max(1, _CHUNK_ELEMENTS.get(logits.device.type, 1 << 22) // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]
