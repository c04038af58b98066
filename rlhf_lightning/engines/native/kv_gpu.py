"""Decoding steps on a GPU, in which the host never waits for a result.

So a step can be captured in a CUDA graph (`cuda_graphs`): its kernels and shapes are the same at any response
lengths. In half precision a row reads the valid part of its slot; in float32 the whole slot, masked.

Flash attention takes each key-value head of a row for a sequence of its own. Given all heads of a row, it
copies the queries, and its results back, so that those of a group are adjacent: 6 to 42% longer (H200).
More sequences than one call takes are several calls.
"""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_lightning.engines.native.cache import Cache, Places
from rlhf_lightning.engines.native.kv import Step
from rlhf_lightning.engines.packed.flash import Spans, has_flash_attention, without_cudnn
from rlhf_lightning.engines.packed.layer import Layer

_MOST_SEQUENCES = 65_535
"""Most sequences of one call of flash attention: CUDA takes no larger grid in y."""


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, including what torch has reserved and no tensor uses."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class GPUDecode(Step):
    """A step on a GPU."""

    def __init__(self, cache: Cache, position: Tensor) -> None:
        """Decode at `position` [n] int64; in a slot without a row it may lie beyond the capacity."""
        rows, device = len(position), position.device
        without_cudnn(device)
        self._cache, self._position = cache, position.clamp(max=cache.capacity - 1)
        self._places = Places(torch.arange(rows, device=device), self._position, capacity=cache.capacity)
        self._spans: dict[tuple[int, int], list[Spans]] = {}
        self._masks: dict[int, Tensor] = {}

    def attend_by_token(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """See `Step.attend_by_token`; computes in the dtype that keys are stored in."""
        self._cache.write(layer.number, key, value, self._places)
        keys, values = self._cache.layers[layer.number]
        queries = query.to(keys.dtype)
        if has_flash_attention(queries, values):
            every_key, every_value = (block.view(-1, 1, block.shape[-1]) for block in (keys, values))
            parts = queries.flatten(0, 1).split(_MOST_SEQUENCES)
            spans = self._spans_of(layer.window, keys.shape[1])
            outputs = [
                span.attend(part, every_key, every_value, layer)
                for span, part in zip(spans, parts, strict=True)
            ]
            output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        else:
            rows, mask = len(query), self._mask(layer.window)
            output = scaled_dot_product_attention(
                queries, keys[:rows], values[:rows], attn_mask=mask, scale=layer.scaling
            )
        # Not `view`: a kernel's result may be [n, H / K, K, D] in memory.
        return output.reshape(len(query), -1).to(query.dtype)

    def _spans_of(self, window: int, heads: int) -> list[Spans]:
        """The keys that each head of a row attends to; they begin where its window does, without a mask."""
        if (window, heads) not in self._spans:
            used = (self._position.int() + 1)[:, None].expand(-1, heads).flatten()
            starts = torch.arange(len(used) + 1, dtype=torch.int32, device=used.device)
            keys = starts * self._cache.capacity
            if window:
                hidden = (used - window).clamp(min=0)
                keys, used = torch.cat([keys[:-1] + hidden, keys[-1:]]), used - hidden
            self._spans[window, heads] = [
                Spans(
                    queries=starts[: len(part) + 1],
                    keys=keys[first : first + len(part) + 1],
                    most_queries=1,
                    most_keys=min(window or self._cache.capacity, self._cache.capacity),
                    used=part,
                )
                for first, part in zip(count(0, _MOST_SEQUENCES), used.split(_MOST_SEQUENCES), strict=False)
            ]
        return self._spans[window, heads]

    def _mask(self, window: int) -> Tensor:
        """[n, 1, 1, capacity] bool, the positions that each row attends to."""
        if window not in self._masks:
            places = torch.arange(self._cache.capacity, device=self._position.device)
            distance = self._position[:, None] - places
            seen = distance >= 0 if window == 0 else (distance >= 0) & (distance < window)
            self._masks[window] = seen[:, None, None]
        return self._masks[window]
