"""Variable-length flash attention on GPUs that have it: sequences of any lengths, no padding, no mask.

T is the number of queries, S of keys, H of heads, K of key-value heads, n of sequences, D the size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rlhf_lightning.engines.packed.layer import Layer

_LARGEST_HEAD = 256
_OLDEST = (8, 0)
"""Least compute capability: flash attention needs Ampere or later."""


def has_flash_attention(query: Tensor, value: Tensor) -> bool:
    """Whether flash attention takes a query and a value like these: device, dtype, size D [any, any, D]."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in {torch.bfloat16, torch.float16}
        and value.shape[-1] == size <= _LARGEST_HEAD
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= _OLDEST
    )


def without_cudnn(device: torch.device) -> None:
    """Turn cuDNN's attention off in this process, where something attends on a GPU.

    From Hopper on, torch prefers cuDNN, which plans a kernel for each shape and keeps every plan. Packed rows
    and key-value caches have a new shape at almost every call.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Where sequences begin and end, in tensors on the GPU."""

    queries: Tensor
    """[n + 1] int32, the index of each sequence's first query, then T."""
    keys: Tensor
    """[n + 1] int32, the index of each sequence's first key, then S."""
    most_queries: int
    """Most queries of a sequence."""
    most_keys: int
    """Most keys of a sequence."""
    used: Tensor | None = None
    """[n] int32, how many keys of each sequence are valid; None: all."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend causally: query [T, H, D], key and value [S, K, D] -> [T, H, D].

        A sequence's last query stands at its last valid key.
        """
        window = layer.window - 1 if 0 < layer.window < self.most_keys else -1
        # A single query sees all its keys: without a causal mask the kernel computes a group's heads at once.
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
