"""What rows that are generated attend to: `Prefill` fills a cache of keys and values, a `Step` reads it.

K is the number of key-value heads, H of heads, D the size of a head, T the tokens of the prompts, n the rows
being decoded, which hold the slots 0..n-1.
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
"""Ragged rows attend to a multiple of this many places, so that kernels see few shapes."""


class Prefill:
    """Packed prompts, whose keys and values go into slots; rows may share a prompt, computed once."""

    def __init__(
        self, packed: Packed, cache: Cache, *, slot: Tensor, position: Tensor, source: Tensor | None = None
    ) -> None:
        """Write token `source[i]` of the pack (None: token i) to slot[i] and position[i] of the cache."""
        self._packed, self._cache, self._source = packed, cache, source
        self._places = Places(slot, position, capacity=cache.capacity)
        self._layers: set[int] = set()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend within each prompt: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
        if layer.number in self._layers:
            raise ValueError(
                f"layer {layer.number} computes attention twice a token, and the cache holds one key. Take"
                " a decoder with plain causal attention, such as Llama."
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
    """One new token in each of the slots 0..n-1, which sees everything before it in its slot."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend within each slot: query [1, H, n, D], key and value [1, K, n, D] -> [1, n, H, D]."""
        heads, size = key.shape[1], query.shape[3]
        grouped = query[0].transpose(0, 1).unflatten(1, (heads, -1))
        output = self.attend_by_token(grouped, key[0].transpose(0, 1), value[0].transpose(0, 1), layer)
        return output.view(1, len(output), -1, size)

    @abstractmethod
    def attend_by_token(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend within each slot: query [n, K, H / K, D], key and value [n, K, D] -> [n, H D].

        Heads that share a key are handed over as if they were queries of one sequence: nothing is repeated.
        """


class Decode(Step):
    """A step on a CPU, over the places that rows have come to by now."""

    def __init__(self, cache: Cache, position: Tensor, *, shortest: int, longest: int) -> None:
        """Decode at `position` [n] int64, whose bounds are known."""
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
        # Between half and all of the time of the fused kernel, which is made for many queries.
        output = self._weighted(self._weights(query.float(), keys, mask, layer), values)
        return output.view(rows, -1).to(query.dtype)

    def _weights(self, query: Tensor, keys: Tensor, mask: Tensor | None, layer: Layer) -> Tensor:
        """Softmax of queries [n, K, G, D] times keys [n, K, L, D] -> [n K, G, L]; mask [n, 1, 1, L]."""
        queries, rows = query.flatten(0, 1), keys.flatten(0, 1)
        if mask is None:
            added, beta = _nothing(query.dtype), 0.0
        else:
            added, beta = self._mask(mask, layer.window, heads=keys.shape[1]), 1.0
        if query.shape[2] == 1:  # one query a key: the other way round takes up to twice as long
            column = added.transpose(1, 2)
            scores = torch.baddbmm(column, rows, queries.transpose(1, 2), beta=beta, alpha=layer.scaling)
            return scores.view(len(rows), 1, -1).softmax(-1)
        scores = torch.baddbmm(added, queries, rows.transpose(1, 2), beta=beta, alpha=layer.scaling)
        return scores.softmax(-1)

    def _mask(self, mask: Tensor, window: int, *, heads: int) -> Tensor:
        """The mask of each key head's row: [n K, 1, L]."""
        found = self._masks.get((window, heads))
        if found is None:
            found = self._masks[window, heads] = mask[:, 0].repeat_interleave(heads, 0)
        return found

    def _weighted(self, weights: Tensor, values: Tensor) -> Tensor:
        """Sums of values: weights [n K, G, L] and values [n, K, L, D] -> [n K G, D].

        Each is a bag of embeddings, which torch adds up twice as fast as many products with one row each.
        """
        size, apart = values.shape[3], values.stride(1) // values.shape[3]
        count, group, length = weights.shape
        bags = count, group, length, apart
        if bags not in self._bags:  # in the first layer of a step
            first = (torch.arange(count, dtype=torch.int32) * apart).repeat_interleave(group)
            places = first[:, None] + torch.arange(length, dtype=torch.int32)
            self._bags[bags] = places.view(-1), torch.arange(0, places.numel(), length, dtype=torch.int32)
        table = values.as_strided(((count - 1) * apart + length, size), (size, 1))
        places, starts = self._bags[bags]
        # What `functional.embedding_bag` calls with the sums of rows; it makes the starts anew each time.
        return torch.embedding_bag(table, places, starts, per_sample_weights=weights.view(-1))[0]

    def _view(self, window: int) -> tuple[int, int, Tensor | None]:
        """First place anyone sees, one past the last, and the mask of each row: [n, 1, 1, end - begin]."""
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
    """What is added 0 times."""
    return torch.zeros(1, 1, 1, dtype=dtype)


Cached = Prefill | Step
"""What the tokens of a generation attend to; a layer's keys and values stay in its cache."""
