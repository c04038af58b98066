"""Rows that answer the same prompt have it computed once.

    rows        A B C 1 2      packed       A B C 1 2 3 4 5      attention, per row     A B C 1 2
                A B C 3 4 5                                                             A B C 3 4 5

Only attention sees a copy of the prompt for every row, taken from the one computed, where its gradient goes.
What is saved is all the rest of a decoder: projections, feed-forward layers and norms.

n is the number of rows, P the prompt width, R the response width, T the tokens of all rows, S <= T those that
are computed, H heads, K key-value heads, D the size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from rlhf_lightning.engines.packed.attention import Packed
from rlhf_lightning.engines.packed.layer import Layer

_WORTH = 0.1
"""Least share of tokens saved for which rows are shared: the copies in attention cost something too."""


class Shared:
    """Sequences that share tokens: those computed are spread to whole sequences for attention alone."""

    def __init__(self, whole: Packed, *, computed: Tensor, source: Tensor) -> None:
        """Attend as `whole` does, the sequences as if nothing were shared."""
        self._whole = whole
        self.computed = computed
        """[S] int64, the places of `whole` that are computed."""
        self.source = source
        """[T] int64, for each place of `whole` the computed token that stands there."""
        self.position_ids = whole.position_ids[:, computed]
        """[1, S] int64, the place of each computed token in its sequence."""
        self.spoken: Tensor | None = None
        """See `Packed.spoken`; of the computed tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend: query [1, H, S, D], key and value [1, K, S, D] -> [1, S, H, D]."""
        tokens = (x[0].transpose(0, 1) for x in (query, key, value))
        q, k, v = (_rows(x, self.source).transpose(0, 1)[None] for x in tokens)
        return _rows(self._whole.attend(q, k, v, layer)[0], self.computed)[None]


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index]; as an embedding, since a GPU adds the gradient of index_select up in no fixed order."""
    return embedding(index, x.flatten(1)).view(-1, *x.shape[1:])


def share(whole: Packed, present: Tensor, prompt_ids: Tensor) -> Shared | None:
    """Share the prompts of the rows that have the same; None where too little would be saved.

    Args:
        whole: the sequences as if nothing were shared.
        present: [n, P + R] bool, the places of the rows that hold the tokens of these sequences.
        prompt_ids: [n, P] int64; prompts of one length stand in the same places.
    """
    width = prompt_ids.shape[1]
    first = _first_alike(prompt_ids.where(present[:, :width], -1))
    kept = present.clone()
    kept[:, :width] &= (first == torch.arange(len(first), device=first.device))[:, None]
    flags = kept[present]
    computed = flags.nonzero()[:, 0]
    if len(flags) - len(computed) < max(1.0, _WORTH * len(flags)):
        return None
    order = kept.flatten().cumsum(0).view(kept.shape) - 1
    order[:, :width] = order[first, :width]
    return Shared(whole, computed=computed, source=order[present])


def _first_alike(x: Tensor) -> Tensor:
    """For each row the first row that is equal: [n, P] -> [n] int64."""
    number = torch.unique(x, dim=0, return_inverse=True)[1]
    rows = torch.arange(len(x), device=x.device)
    return torch.full_like(rows, len(x)).scatter_reduce_(0, number, rows, "amin")[number]
