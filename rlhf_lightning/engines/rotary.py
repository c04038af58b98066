"""Rotary position embeddings with the angles that transformers computes (RoFormer, Su et al. 2021, eq. 34).

T is the number of tokens, D the size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

_MODULES = {"llama": LlamaRotaryEmbedding, "qwen2": Qwen2RotaryEmbedding}


class Rotary:
    """The angles of one model, scaled as its configuration says.

    Args:
        config: of a Llama or Qwen2 model.
        device: where positions are.
    """

    def __init__(self, config: PreTrainedConfig, device: torch.device) -> None:
        self._module = _MODULES[config.model_type](config).to(device)

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> Angles:
        """The angles of [1, T] positions."""
        like = torch.empty(0, dtype=dtype, device=position_ids.device)
        cos, sin = self._module(like, position_ids)
        return Angles(cos[0, :, None, None], sin[0, :, None, None])


class Angles:
    """Turns heads by the angles of their tokens.

    Args:
        cos: [T, 1, 1, D], its halves equal.
        sin: [T, 1, 1, D], its halves equal.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        first, second = sin.chunk(2, dim=-1)
        self._cos, self._sin = cos, torch.cat((-first, second), dim=-1)

    def turn(self, heads: Tensor) -> Tensor:
        """[T, any, any, D] -> the same shape: (a, b) becomes (a cos - b sin, b cos + a sin)."""
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        return torch.addcmul(heads * self._cos, swapped, self._sin)
