"""Attention in generation: `Prefill` writes the keys and values of prompts to a cache, a `Step` reads them.

    prompts ── Prefill ──> cache <── append one token per row, attend to its slot ── Step, again and again

K is the number of key-value heads, H of heads, D the size of a head, T the number of tokens of the prompts,
n of rows being decoded, which have the slots 0..n-1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor

from rlhf_lightning.engines.native.cache import Cache, Places
from rlhf_lightning.engines.packed.attention import Packed
from rlhf_lightning.engines.packed.layer import Layer

_ROUND = 16
"""Rows of different lengths attend to a multiple of so many positions, so that kernels see few shapes."""


class Prefill:
    """Packed prompts whose keys and values go into slots; equal prompts of several rows are computed once."""

    def __init__(
        self, packed: Packed, cache: Cache, *, slot: Tensor, position: Tensor, source: Tensor | None = None
    ) -> None:
        """Write packed token `source[i]` (None: token i) to position[i] of slot[i] of the cache."""
        self._packed, self._cache, self._source = packed, cache, source
        self._places = Places(slot, position, capacity=cache.capacity)
        self._layers: set[int] = set()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend within each prompt: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
        if layer.number in self._layers:
            raise ValueError(
                f"layer {layer.number} computes attention twice a token, and the cache holds one key a token."
                " Take a decoder with plain causal attention, such as Llama."
            )
        self._layers.add(layer.number)
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        if self._source is not None:
            keys, values = keys.index_select(0, self._source), values.index_select(0, self._source)
        self._cache.write(layer.number, keys, values, self._places)
        return self._packed.attend(query, key, value, layer)

    def attend_by_token(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend within each prompt: query [T, K, H / K, D], key and value [T, K, D] -> [T, H D]."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query.flatten(1, 2), key, value))
        return self.attend(q, k, v, layer)[0].flatten(1)


class Step(ABC):
    """One new token in each of the slots 0..n-1, which attends to all tokens before it in its slot."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend within each slot: query [1, H, n, D], key and value [1, K, n, D] -> [1, n, H, D]."""
        heads, size = key.shape[1], value.shape[3]
        grouped = query[0].transpose(0, 1).unflatten(1, (heads, -1))
        output = self.attend_by_token(grouped, key[0].transpose(0, 1), value[0].transpose(0, 1), layer)
        return output.view(1, len(output), -1, size)

    @abstractmethod
    def attend_by_token(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend within each slot: query [n, K, H / K, D], key and value [n, K, D] -> [n, H D].

        The H / K heads that share a key are passed like queries of one sequence, so no key is repeated.
        """


class Decode(Step):
    """A step on a CPU: reads the cache only as far as the rows have come."""

    def __init__(self, cache: Cache, position: Tensor, *, shortest: int, longest: int) -> None:
        """Decode at `position` [n] int64, which lies in [shortest, longest]."""
        self._cache, self._position = cache, position
        self._shortest, self._longest = shortest, longest
        slots = torch.arange(len(position), device=position.device)
        self._places = Places(slots, position, capacity=cache.capacity)
        self._views: dict[int, tuple[int, int, Tensor | None]] = {}
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._bags: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def attend_by_token(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """See `Step.attend_by_token`; in float32."""
        rows = len(key)
        if self._shortest == self._longest:
            self._cache.append(layer.number, key, value, self._longest)
        else:
            self._cache.write(layer.number, key, value, self._places)
        if layer.window not in self._views:
            self._views[layer.window] = self._view(layer.window)
        begin, end, mask = self._views[layer.window]
        keys, values = (
            block.narrow(0, 0, rows).narrow(2, begin, end - begin).float()
            for block in self._cache.layers[layer.number]
        )
        # Takes half to all of the time of the fused kernel, which is made for many queries.
        output = self._weighted(self._weights(query.float(), keys, mask, layer), values)
        return output.view(rows, -1).to(query.dtype)

    def _weights(self, query: Tensor, keys: Tensor, mask: Tensor | None, layer: Layer) -> Tensor:
        """Softmax of queries [n, K, G, D] times keys [n, K, L, D] -> [n K, G, L]; mask [n, 1, 1, L]."""
        queries, rows = query.flatten(0, 1), keys.flatten(0, 1)
        if mask is None:
            added, beta = _nothing(query.dtype), 0.0
        else:
            added, beta = self._mask(mask, layer.window, heads=keys.shape[1]), 1.0
        if query.shape[2] == 1:  # one query per key: queries times keys would take up to twice as long
            column = added.transpose(1, 2)
            scores = torch.baddbmm(column, rows, queries.transpose(1, 2), beta=beta, alpha=layer.scaling)
            return scores.view(len(rows), 1, -1).softmax(-1)
        scores = torch.baddbmm(added, queries, rows.transpose(1, 2), beta=beta, alpha=layer.scaling)
        return scores.softmax(-1)

    def _mask(self, mask: Tensor, window: int, *, heads: int) -> Tensor:
        """The mask [n, 1, 1, L] repeated for each key head: [n K, 1, L]."""
        found = self._masks.get((window, heads))
        if found is None:
            found = self._masks[window, heads] = mask[:, 0].repeat_interleave(heads, 0)
        return found

    def _weighted(self, weights: Tensor, values: Tensor) -> Tensor:
        """Weighted sums of values: weights [n K, G, L] and values [n, K, L, D] -> [n K G, D].

        Computed as bags of embeddings (a bag is one weighted sum of rows of a table, here the cache), which
        takes half the time of many products with a single row.
        """
        size, stride = values.shape[3], values.stride(1) // values.shape[3]
        count, group, length = weights.shape
        bags = count, group, length, stride
        if bags not in self._bags:  # in the first layer of a step
            first = (torch.arange(count, dtype=torch.int32) * stride).repeat_interleave(group)
            places = first[:, None] + torch.arange(length, dtype=torch.int32)
            self._bags[bags] = places.view(-1), torch.arange(0, places.numel(), length, dtype=torch.int32)
        table = values.as_strided(((count - 1) * stride + length, size), (size, 1))
        places, starts = self._bags[bags]
        # `functional.embedding_bag` calls the same, but makes the starts anew each time.
        return torch.embedding_bag(table, places, starts, per_sample_weights=weights.view(-1))[0]

    def _view(self, window: int) -> tuple[int, int, Tensor | None]:
        """The range [begin, end) of positions that any row attends to, and a mask [n, 1, 1, end - begin]."""
        begin = max(0, self._shortest - window + 1) if window else 0
        if self._shortest == self._longest:
            return begin, self._longest + 1, None
        end = min(self._cache.capacity, begin + -(-(self._longest + 1 - begin) // _ROUND) * _ROUND)
        distance = self._position[:, None] - torch.arange(begin, end, device=self._position.device)
        hidden = distance < 0 if window == 0 else (distance < 0) | (distance >= window)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
        return begin, end, mask[:, None, None]


@cache
def _nothing(dtype: torch.dtype) -> Tensor:
    """A placeholder for the first argument of baddbmm, which beta = 0 ignores."""
    return torch.zeros(1, 1, 1, dtype=dtype)


Cached = Prefill | Step
"""What the tokens of a decoder's call attend to; both write their keys and values to a cache."""
