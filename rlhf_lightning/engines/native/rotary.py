"""Rotary position embeddings (RoFormer, Su et al. 2021, eq. 34) for decoding, by transformers' own angles.

T is the number of tokens, D the size of a head.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

_STATIC = ("default", "linear", "llama3", "yarn")
"""Values of `rope_type` whose angles depend on a token's position only."""


def has_static_angles(config: PreTrainedConfig) -> bool:
    """Whether a model's angles, if any, depend on a token's position only, not on the batch's length."""
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [found, *(kind for kind in found.values() if isinstance(kind, dict))]
    return all(kind.get("rope_type", "default") in _STATIC for kind in kinds)


class Rotary:
    """Computes the angles of one model; on a CPU static angles are looked up in a table."""

    def __init__(self, config: PreTrainedConfig, device: torch.device) -> None:
        self._module = LlamaRotaryEmbedding(cast(LlamaConfig, config)).to(device)  # Qwen2's is the same
        self._tabled = device.type == "cpu" and has_static_angles(config)
        self._table: Angles | None = None
        """The angles of the positions from 0 on, as many as were needed so far."""

    def __call__(self, places: Tensor, dtype: torch.dtype) -> Angles:
        """The angles of T positions, [T]."""
        if not self._tabled:
            return self._computed(places, dtype)
        last = int(places.max()) if len(places) else 0
        if self._table is None or last >= len(self._table.cos) or self._table.cos.dtype != dtype:
            self._table = self._computed(torch.arange(1 << last.bit_length()), dtype)
        return self._table.of(places)

    def _computed(self, places: Tensor, dtype: torch.dtype) -> Angles:
        like = torch.empty(0, dtype=dtype, device=places.device)
        cos, sin = (x[0, :, None, None] for x in self._module(like, places[None]))
        first, second = sin.chunk(2, dim=-1)
        return Angles(cos, torch.cat((-first, second), dim=-1))


class Angles:
    """The angles of T tokens, which rotate their heads.

    Args:
        cos: [T, 1, 1, D], its halves equal.
        sin: [T, 1, 1, D], its halves equal but for the sign, which is negative in the first.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self._sin = cos, sin

    def of(self, tokens: Tensor) -> Angles:
        """The angles of some of the tokens, [any] int64."""
        return Angles(self.cos.index_select(0, tokens), self._sin.index_select(0, tokens))

    def turn(self, heads: Tensor) -> Tensor:
        """Rotate heads [T, any, any, D]: halves (a, b) become (a cos - b sin, b cos + a sin)."""
        half = heads.shape[-1] // 2
        # On a GPU `cat` takes one operation and `roll` two; on a CPU `roll` is faster.
        swapped = (
            torch.cat((heads[..., half:], heads[..., :half]), -1) if heads.is_cuda else heads.roll(half, -1)
        )
        return torch.addcmul(heads * self.cos, swapped, self._sin)
