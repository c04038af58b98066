"""The key-value cache of a generation: for each layer a block of slots, one slot per row being decoded.

    slot 0 | prompt ......... response ..     |
    slot 1 | prompt ... response ........     |   [slots, K, capacity, D] for keys, the same for values
    slot 2 | prompt ..... response .          |

K is the number of key-value heads, D the size of a head, T the number of tokens of the prompts, n of rows
being decoded, which have the slots 0..n-1.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Cache:
    """Keys and values by layer, slot and position; a layer's blocks are allocated at its first write."""

    def __init__(self, slots: int, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        """Make room for `slots` rows of at most `capacity` tokens, in `dtype` (None: that of the model)."""
        self.slots, self.capacity, self.dtype = slots, capacity, dtype
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values [slots, K, capacity, D] of each layer; 0, not NaN, where nothing was written."""

    def write(self, layer: int, key: Tensor, value: Tensor, places: Places) -> None:
        """Write the key and value [T, K, D] of T tokens at their places."""
        place = places.of(key.shape[1]).view(-1)
        for block, tokens in zip(self._blocks(layer, key, value), (key, value), strict=True):
            rows = tokens.flatten(0, 1).to(block.dtype)
            block.view(-1, rows.shape[-1]).index_put_((place,), rows)

    def append(self, layer: int, key: Tensor, value: Tensor, position: int) -> None:
        """Write key and value [n, K, D] at one position of the slots 0..n-1."""
        for block, tokens in zip(self._blocks(layer, key, value), (key, value), strict=True):
            block.narrow(0, 0, len(tokens)).select(2, position).copy_(tokens)

    def _blocks(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            self.layers[layer] = (self._block(key), self._block(value))
        return self.layers[layer]

    def _block(self, tokens: Tensor) -> Tensor:
        _, heads, size = tokens.shape
        return tokens.new_zeros(self.slots, heads, self.capacity, size, dtype=self.dtype or tokens.dtype)

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of the slots `source` to the slots `target`, all distinct."""
        for blocks in self.layers.values():
            for block in blocks:
                used = block[:, :, :length]
                used.index_copy_(0, target, used.index_select(0, source))


class Places:
    """Where tokens go in a cache: (slot, position) as indices of a block, for any number of heads."""

    def __init__(self, slot: Tensor, position: Tensor, *, capacity: int) -> None:
        """Token i goes to position[i] of slot[i], both [T] int64."""
        self._slot, self._position, self._capacity = slot, position, capacity
        self._places: dict[int, Tensor] = {}

    def of(self, heads: int) -> Tensor:
        """[T, heads] int64, indices of a block viewed as [slots * heads * capacity, D]."""
        if heads not in self._places:
            rows = self._slot[:, None] * heads + torch.arange(heads, device=self._slot.device)
            self._places[heads] = rows * self._capacity + self._position[:, None]
        return self._places[heads]
