"""The RMSNorm of Llama and Qwen2 (Zhang and Sennrich 2019, eq. 4), for decoding.

T is the number of tokens, H the hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import PreTrainedConfig


class Norm:
    """x / sqrt(mean(x^2) + eps), times a weight."""

    def __init__(self, config: PreTrainedConfig, like: Tensor) -> None:
        self._eps: float = config.rms_norm_eps
        self._own_operations = like.is_cpu and like.dtype == torch.float32
        self._eps_tensor = torch.tensor([self._eps])

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[T, H] -> [T, H] with a weight [H]."""
        if not self._own_operations:
            return rms_norm(hidden, weight.shape, weight, self._eps)
        # In float32 on a CPU torch has no fused kernel and takes nine operations; here there are five.
        length = torch.linalg.vector_norm(hidden, dim=1, keepdim=True)
        factor = torch.addcmul(self._eps_tensor, length, length, value=1 / hidden.shape[1]).rsqrt_()
        return torch.mul(hidden, factor).mul_(weight)
