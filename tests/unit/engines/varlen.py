"""Flash attention over sequences of any lengths, as torch documents it, for tests on a CPU."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *spans: Tensor | int,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor | None,
) -> Tensor:
    """`varlen_attn`, differentiable: a table of what each query sees.

    Args:
        query: [T, H, D].
        key: [S, K, D].
        value: [S, K, D].
        spans: where queries begin, where keys begin, most queries and most keys of a sequence.
        scale: factor of query times key.
        window_size: keys seen before and after the place of a query; -1: all.
        enable_gqa: whether heads share keys.
        seqused_k: [n] int32, how many keys of each sequence are there; None: all.
    """
    cu_seq_q, cu_seq_k, max_q, max_k = spans
    assert isinstance(cu_seq_q, Tensor)
    assert isinstance(cu_seq_k, Tensor)
    assert {cu_seq_q.dtype, cu_seq_k.dtype} == {torch.int32}
    heads = query.shape[1] // key.shape[1]
    assert enable_gqa == (heads > 1)
    parts, keys = [], cu_seq_k.tolist()
    used = [last - first for first, last in pairwise(keys)] if seqused_k is None else seqused_k.tolist()
    for (first, last), start, count in zip(pairwise(cu_seq_q.tolist()), keys, used, strict=False):
        k, v = (x[start : start + count].repeat_interleave(heads, 1) for x in (key, value))
        assert last - first <= int(max_q)
        assert count <= int(max_k)
        # The last query stands at the last key.
        distance = torch.arange(first, last)[:, None] - last + count - torch.arange(count)
        before, after = (size if size >= 0 else count for size in window_size)
        scores = torch.einsum("qhd,khd->hqk", query[first:last], k) * scale
        seen = (distance <= before) & (distance >= -after)
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(parts)
