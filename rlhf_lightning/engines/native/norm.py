"""The root mean square norm of Llama and Qwen2 (Zhang and Sennrich 2019, eq. 4), for decoding.

T is the number of tokens, H the hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import PreTrainedConfig


class Norm:
    """x / sqrt(mean(x^2) + eps), times a weight.

    Args:
        config: of the model.
        like: a weight of it.
    """

    def __init__(self, config: PreTrainedConfig, like: Tensor) -> None:
        self._eps: float = config.rms_norm_eps
        self._apart = like.is_cpu and like.dtype == torch.float32
        self._added = torch.tensor([self._eps])

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[T, H] -> [T, H] with a weight [H]."""
        if not self._apart:
            return rms_norm(hidden, weight.shape, weight, self._eps)
        # torch has no kernel of its own there: its nine operations are five here.
        length = torch.linalg.vector_norm(hidden, dim=1, keepdim=True)
        factor = torch.addcmul(self._added, length, length, value=1 / hidden.shape[1]).rsqrt_()
        return torch.mul(hidden, factor).mul_(weight)
