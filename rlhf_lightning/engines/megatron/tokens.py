"""Passes `Sequences` (which tokens of a micro-batch form a sequence) through Megatron's layers to attention.

T is the number of tokens, H heads, K key-value heads, D the size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlhf_lightning.engines.packed.attention import Sequences
from rlhf_lightning.engines.packed.layer import Layer


@dataclass
class Tokens(PackedSeqParams):  # type: ignore[misc]
    """The argument that Megatron passes on to attention, with our `Sequences`."""

    sequences: Sequences | None = None


class Padded:
    """Sequences followed by padding, which sequence parallelism needs to divide the tokens evenly.

    Args:
        sequences: of the tokens before the padding.
        missing: number of padding tokens.
    """

    def __init__(self, sequences: Sequences, missing: int) -> None:
        self._sequences, self._missing = sequences, missing

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        """Attend: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D], 0 for the padding."""
        size = query.shape[2] - self._missing
        attended = self._sequences.attend(query[:, :, :size], key[:, :, :size], value[:, :, :size], layer)
        return torch.cat([attended, attended.new_zeros(1, self._missing, *attended.shape[2:])], 1)
