"""The key-value cache and decoding steps on a GPU, in which the host never waits for a result.

    [slots, capacity, K, D] in memory: the heads of a token are adjacent, as flash attention needs them

So a step can be captured in a CUDA graph (`cuda_graphs`): its kernels and shapes are the same at any response
lengths. In half precision a row reads the valid part of its slot; in float32 the whole slot, masked.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_lightning.engines.native.cache import Cache, Places
from rlhf_lightning.engines.native.kv import Step
from rlhf_lightning.engines.packed.flash import Spans, has_flash_attention
from rlhf_lightning.engines.packed.layer import Layer


class GPUCache(Cache):
    """See the head of the module; `layers` are views [slots, K, capacity, D], as in `Cache`."""

    def write(self, layer: int, key: Tensor, value: Tensor, places: Places) -> None:
        """See `Cache.write`."""
        for block, tokens in zip(self._blocks(layer, key, value), (key, value), strict=True):
            by_place(block).index_put_((places.flat,), tokens.to(block.dtype))

    def _block(self, tokens: Tensor) -> Tensor:
        _, heads, size = tokens.shape
        dtype = self.dtype or tokens.dtype
        return tokens.new_zeros(self.slots, self.capacity, heads, size, dtype=dtype).transpose(1, 2)


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, including what torch has reserved and no tensor uses."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def by_place(block: Tensor) -> Tensor:
    """A block as [slots * capacity, K, D], in the same memory."""
    return block.transpose(1, 2).flatten(0, 1)


class GPUDecode(Step):
    """A step on a GPU."""

    def __init__(self, cache: Cache, position: Tensor) -> None:
        """Decode at `position` [n] int64; in a slot without a row it may lie beyond the capacity."""
        count, device = len(position), position.device
        self._cache, self._position = cache, position.clamp(max=cache.capacity - 1)
        self._places = Places(torch.arange(count, device=device), self._position, capacity=cache.capacity)
        self._starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        self._spans: dict[int, Spans] = {}
        self._masks: dict[int, Tensor] = {}

    def attend_by_token(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """See `Step.attend_by_token`; computes in the dtype that keys are stored in."""
        self._cache.write(layer.number, key, value, self._places)
        keys, values = self._cache.layers[layer.number]
        queries = query.to(keys.dtype)
        if has_flash_attention(queries, values):
            spans = self._spans_of(layer.window)
            output = spans.attend(queries.flatten(1, 2), by_place(keys), by_place(values), layer)
        else:
            rows, mask = len(query), self._mask(layer.window)
            output = scaled_dot_product_attention(
                queries, keys[:rows], values[:rows], attn_mask=mask, scale=layer.scaling
            )
        # Not `view`: a kernel's result may be [n, H / K, K, D] in memory.
        return output.reshape(len(query), -1).to(query.dtype)

    def _spans_of(self, window: int) -> Spans:
        """The keys that each row attends to; they begin where its window does, so no mask is needed."""
        if window not in self._spans:
            keys, used = self._starts * self._cache.capacity, self._position.int() + 1
            if window:
                hidden = (used - window).clamp(min=0)
                keys, used = torch.cat([keys[:-1] + hidden, keys[-1:]]), used - hidden
            self._spans[window] = Spans(
                queries=self._starts,
                keys=keys,
                most_queries=1,
                most_keys=min(window or self._cache.capacity, self._cache.capacity),
                used=used,
            )
        return self._spans[window]

    def _mask(self, window: int) -> Tensor:
        """[n, 1, 1, capacity] bool, the positions that each row attends to."""
        if window not in self._masks:
            places = torch.arange(self._cache.capacity, device=self._position.device)
            distance = self._position[:, None] - places
            seen = distance >= 0 if window == 0 else (distance >= 0) & (distance < window)
            self._masks[window] = seen[:, None, None]
        return self._masks[window]
