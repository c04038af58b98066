"""Flash attention over sequences of any lengths, where a GPU has it: nothing is padded, and no mask is built.

T is the number of queries, S of keys, H heads, K key-value heads, D the size of a head, n of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rlhf_lightning.engines.packed.layer import Layer

_LARGEST_HEAD = 256
_OLDEST = (8, 0)
"""Compute capability of the first GPUs that have it: Ampere."""


def flashes(query: Tensor, value: Tensor) -> bool:
    """Whether flash attention computes with a query and a value like these, [any, any, D]."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in {torch.bfloat16, torch.float16}
        and value.shape[-1] == size <= _LARGEST_HEAD
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= _OLDEST
    )


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Where sequences begin and end, known to the GPU."""

    queries: Tensor
    """[n + 1] int32, the first query of each sequence, and T."""
    keys: Tensor
    """[n + 1] int32, the first key of each, and S."""
    most_queries: int
    """Of one sequence."""
    most_keys: int
    """Of one sequence."""
    used: Tensor | None = None
    """[n] int32, how many of the keys of each are there; None: all."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend causally: query [T, H, D], key and value [S, K, D] -> [T, H, D]; all end together."""
        window = layer.window - 1 if 0 < layer.window < self.most_keys else -1
        # One query sees all of its keys; where nothing is hidden the heads of a group are computed at once.
        after = -1 if self.most_queries == 1 and window == -1 else 0
        output = varlen_attn(
            query,
            key,
            value,
            self.queries,
            self.keys,
            self.most_queries,
            self.most_keys,
            scale=layer.scaling,
            window_size=(window, after),
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=self.used,
        )
        assert isinstance(output, Tensor)
        return output
