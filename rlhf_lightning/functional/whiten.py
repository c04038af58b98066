"""Whitening: advantages of a whole batch at mean 0 and variance 1, also if its rows are on many ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_lightning.functional.estimator import Add, alone
from rlhf_lightning.functional.masked import masked_sum, widened, zero_masked


def whiten(x: Tensor, mask: Tensor, *, unbiased: bool = True, eps: float = 1e-8, add: Add = alone) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over all valid tokens: (x - mean) / sqrt(var + eps).

    Give it the whole rollout batch, or a share of it and the sum over all shares: whitening each rank's share
    alone (TRL) lets the placement change the result.

    Args:
        x: [B, R].
        mask: [B, R] bool.
        unbiased: divide by n - 1 (verl, NeMo-RL) or, if False, by n (OpenRLHF, AReaL).
        eps: added to the variance.
        add: sums over all holders of rows, in float64; called twice.

    Returns:
        [B, R]; all 0 if there is one valid token or none.
    """
    wide = zero_masked(x, mask).double()
    count, total = add(torch.stack((mask.sum().double(), wide.sum()))).unbind()
    deviation = zero_masked(wide - total / count.clamp(min=1), mask)
    squares = add(masked_sum(deviation.square(), mask))
    variance = squares / (count - int(unbiased)).clamp(min=1)
    return (deviation * torch.rsqrt(variance + eps)).to(widened(x).dtype)
