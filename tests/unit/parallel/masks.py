"""Which numbers of a model a rank holds, found slowly: by cutting tensors, without intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig

from rlhf_lightning.engines.conversion import Conversion
from rlhf_lightning.parallel import Sharded
from rlhf_lightning.parallel.weights import Slice

Mask = NDArray[np.bool_]
"""One flag for each number of the model, parameter by parameter."""
LAYERS = 8


def llama(*, tied: bool) -> tuple[Sharded, ...]:
    """A Llama whose key-value heads are fewer than 8 tensor ranks, with a padded vocabulary."""
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    return tuple(Conversion(config, vocabulary_multiple=8).parameters)


class Masks:
    """The shards of a model as masks.

    Args:
        params: of the whole model.
    """

    def __init__(self, params: Sequence[Sharded]) -> None:
        self.params = params
        sizes = [param.numel for param in params]
        self.length = sum(sizes)
        self.starts = dict(zip((p.name for p in params), accumulate(sizes, initial=0), strict=False))
        self._found: dict[tuple[object, ...], Mask] = {}

    def shard(self, stages: Sequence[Sequence[int]], stage: int, *, t: int, index: int) -> Mask:
        """What tensor rank `index` of `t` holds of a stage."""
        key = (tuple(map(tuple, stages)), stage, t, index)
        if key not in self._found:
            places: set[object] = {*stages[stage]}
            if stage == 0:
                places |= {"first", "ends"}
            if stage == len(stages) - 1:
                places |= {"last", "ends"}
            mask = np.zeros(self.length, bool)
            for param in self.params:
                if param.place in places:
                    mask[self._part(param, t, index)] = True
            self._found[key] = mask
        return self._found[key]

    def flat(self, count: int, index: int) -> Mask:
        """Part `index` of `count` of each flattened parameter."""
        mask = np.zeros(self.length, bool)
        for param in self.params:
            numbers = self._numbers[param.name].flatten().numpy()
            mask[numbers[param.numel * index // count : param.numel * (index + 1) // count]] = True
        return mask

    def counts(self, slices: Iterable[Slice]) -> NDArray[np.int64]:
        """How often each number is in these pieces."""
        counts = np.zeros(self.length, np.int64)
        for piece in slices:
            numbers = self._numbers[piece.name]
            if piece.dim is None:
                numbers, dim = numbers.flatten(), 0
            else:
                dim = piece.dim
            counts[numbers.narrow(dim, piece.start, piece.stop - piece.start).flatten().numpy()] += 1
        return counts

    def _part(self, param: Sharded, t: int, index: int) -> NDArray[np.int64]:
        numbers = self._numbers[param.name]
        if param.dim is None:
            return numbers.flatten().numpy()
        sections = numbers.split(param.sections or param.shape[param.dim], dim=param.dim)
        return np.concatenate([s.chunk(t, dim=param.dim)[index].flatten().numpy() for s in sections])

    @cached_property
    def _numbers(self) -> dict[str, torch.Tensor]:
        return {
            p.name: torch.arange(self.starts[p.name], self.starts[p.name] + p.numel).view(p.shape)
            for p in self.params
        }
