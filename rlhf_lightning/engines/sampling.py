"""Draws tokens in generation; each depends on the seed, the row's id and the position, not on other rows.

So a row gets the same response in any batch, on any rank, and after any pause.

n is the number of rows, V the size of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lightning.engines.determinism import cumulated
from rlhf_lightning.spec import Sampling

BITS = 48
"""Number of bits of a number from `uniform`."""
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FORK = 8


def _mixed(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014) on int64, which wraps; `_shifted` shifts unsigned."""
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seed: int, row_ids: Tensor, position: Tensor) -> Tensor:
    """A random number in [0, 1) for every (seed, row, position), a multiple of 2^-48.

    Args:
        seed: any integer; taken modulo 2^64.
        row_ids: int64, the rows' ids.
        position: int64, broadcast against `row_ids`: the position in the response.

    Returns:
        float64 of the broadcast shape.
    """
    wrapped = (seed + 2**63) % 2**64 - 2**63
    state = _mixed(torch.tensor(wrapped, dtype=torch.int64, device=row_ids.device))
    state = _mixed(_mixed(state ^ row_ids) ^ position)
    return _fraction(state)


def _fraction(state: Tensor) -> Tensor:
    return _shifted(state, 64 - BITS).double().div(2**BITS)


def sample(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw a token for each row.

    Args:
        logits: [n, V], any floating type.
        u: [n] float64 in [0, 1), as from `uniform`; the token depends on it alone.
        sampling: temperature and truncation.

    Returns:
        token: [n] int64.
        log_prob: [n] float32, natural log of its probability under softmax(logits / temperature) before
            truncation; greedy, under softmax(logits).
    """
    greedy = sampling.temperature == 0
    scaled = logits.float() if greedy or sampling.temperature == 1 else logits.float() / sampling.temperature
    probs = scaled.softmax(-1)
    token = scaled.argmax(-1) if greedy else _drawn(_truncated(probs, sampling), u)
    return token, probs.gather(-1, token[:, None])[:, 0].log()


def _truncated(probs: Tensor, sampling: Sampling) -> Tensor:
    """`probs` with 0 for tokens that min-p, top-k and top-p exclude; ties with the last one kept stay."""
    if sampling.min_p > 0:
        probs = probs.where(probs >= sampling.min_p * probs.amax(-1, keepdim=True), 0)
    if 0 < sampling.top_k < probs.shape[-1]:
        probs = probs.where(probs >= probs.topk(sampling.top_k).values[:, -1:], 0)
    if sampling.top_p < 1:
        probs = probs.where(probs >= _nucleus(probs, sampling.top_p), 0)
    return probs


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """[n, 1], the least probability kept by top-p: all likelier tokens together have less than `top_p`."""
    target = top_p * probs.sum(-1, keepdim=True, dtype=torch.float64)
    size = probs.shape[-1]
    for count in (64, 512, size):  # for a trained model few tokens are enough, and sorting all is slow
        ranked = probs.topk(min(count, size)).values
        heights = cumulated(ranked)
        if count >= size or bool((heights[:, -1:] >= target).all()):
            break
    kept = (heights - ranked < target).sum(-1, keepdim=True)
    return ranked.gather(-1, kept.clamp(min=1) - 1)


def _drawn(weights: Tensor, u: Tensor) -> Tensor:
    """Draw a token [n] by inverse CDF at every fork of a tree over the vocabulary, with a number for each.

    In one cumulative sum over the vocabulary a rounding error of 1e-6, as of another batch size, would shift
    all tokens behind it, and change one draw in some thousands. Here it stays within its fork.
    """
    levels: list[Tensor] = []
    sizes: list[int] = []
    nodes = weights
    while nodes.shape[-1] > 1:
        sizes.append(nodes.shape[-1])
        whole = pad(nodes, (0, -sizes[-1] % _FORK)) if sizes[-1] % _FORK else nodes
        levels.append(torch.unflatten(whole, -1, (_FORK, -1)))
        nodes = levels[-1].sum(1)
    forks = torch.arange(len(levels), device=u.device)[:, None]
    numbers = _fraction(_mixed(_mixed((u * 2**BITS).long()) ^ forks))
    node = torch.zeros(len(u), 1, dtype=torch.int64, device=u.device)
    for level, size, number in zip(reversed(levels), reversed(sizes), numbers, strict=True):
        heights = cumulated(level.gather(2, node[:, None].expand(-1, _FORK, -1))[:, :, 0])
        branch = (heights <= number[:, None] * heights[:, -1:]).sum(1, keepdim=True)
        node = (branch * level.shape[-1] + node).clamp(max=size - 1)
    return node[:, 0]
