"""Computes a prompt once for all rows that answer it, in training and scoring.

    rows        A B C 1 2      packed       A B C 1 2 3 4 5      attention, per row     A B C 1 2
                A B C 3 4 5                                                             A B C 3 4 5

Only attention sees a copy of the prompt in every row, gathered from the computed one, to which the gradients
of all copies are added. Projections, feed-forward layers and norms compute each distinct prompt once.

n is the number of rows, P the prompt width, R the response width, T the number of tokens of all rows, S <= T
of those that are computed, H of heads, K of key-value heads, D the size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from rlhf_lightning.engines.packed.attention import Packed
from rlhf_lightning.engines.packed.layer import Layer

_WORTH = 0.1
"""Least share of tokens that sharing must save: the copies for attention take time too."""


class Shared:
    """Sequences that share prompts: attention gathers whole sequences from the computed tokens."""

    def __init__(self, whole: Packed, *, computed: Tensor, source: Tensor) -> None:
        """Attend as `whole` does, the sequences as if no prompt were shared."""
        self._whole = whole
        self.computed = computed
        """[S] int64, which tokens of `whole` are computed."""
        self.source = source
        """[T] int64, for each token of `whole` the index of the computed token that it is a copy of."""
        self.position_ids = whole.position_ids[:, computed]
        """[1, S] int64, the position of each computed token in its sequence."""
        self.needed: Tensor | None = None
        """See `Packed.needed`; indices among the computed tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend: query [1, H, S, D], key and value [1, K, S, D] -> [1, S, H, D]."""
        tokens = (x[0].transpose(0, 1) for x in (query, key, value))
        q, k, v = (_rows(x, self.source).transpose(0, 1)[None] for x in tokens)
        return _rows(self._whole.attend(q, k, v, layer)[0], self.computed)[None]


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], as an embedding: on a GPU index_select sums gradients in no fixed order."""
    return embedding(index, x.flatten(1)).view(-1, *x.shape[1:])


def share(whole: Packed, present: Tensor, prompt_ids: Tensor) -> Shared | None:
    """Share equal prompts between rows; None where too little would be saved.

    Args:
        whole: the sequences as if no prompt were shared.
        present: [n, P + R] bool, where in the rows the tokens of these sequences are.
        prompt_ids: [n, P] int64; prompts of equal length are at the same columns.
    """
    width = prompt_ids.shape[1]
    first = _first_equal(prompt_ids.where(present[:, :width], -1))
    kept = present.clone()
    kept[:, :width] &= (first == torch.arange(len(first), device=first.device))[:, None]
    flags = kept[present]
    computed = flags.nonzero()[:, 0]
    if len(flags) - len(computed) < max(1.0, _WORTH * len(flags)):
        return None
    order = kept.flatten().cumsum(0).view(kept.shape) - 1
    order[:, :width] = order[first, :width]
    return Shared(whole, computed=computed, source=order[present])


def _first_equal(x: Tensor) -> Tensor:
    """For each row the number of the first row that equals it: [n, P] -> [n] int64."""
    number = torch.unique(x, dim=0, return_inverse=True)[1]
    rows = torch.arange(len(x), device=x.device)
    return torch.full_like(rows, len(x)).scatter_reduce_(0, number, rows, "amin")[number]
