"""The test matrix: masks, numbers with garbage under them, and how closely float types are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MASKS = {
    "right_padding": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]],
    "gap_inside": [[1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    "masked_row": [[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 0]],
    "one_token": [[0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    "nothing": [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    "one_column": [[1], [1], [0], [1]],
}
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = 2e-6
"""float32 has 2^-24 = 6e-8 relative error an operation; some thirty operations of numbers up to 3 follow.
bfloat16 inputs are held to the same: both computations get them rounded, and continue in float32."""


def mask_of(name: str) -> Tensor:
    return torch.tensor(MASKS[name], dtype=torch.bool)


def noise(mask: Tensor, seed: int, *, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal numbers where the mask is True; NaN, inf and -inf in turn where it is False."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(mask.shape, generator=generator) * scale).to(dtype)
    garbage = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)[torch.arange(mask.numel()) % 3]
    return torch.where(mask, x, garbage.view(mask.shape))


def valid(mask: Tensor, row: int) -> list[int]:
    return [t for t in range(mask.shape[1]) if bool(mask[row, t])]


def close(actual: Tensor, expected: Tensor | Sequence[float] | Sequence[Sequence[float]] | float) -> None:
    """Compare a float32 result with numbers that Python computed in double precision."""
    wanted = torch.as_tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(actual, wanted, rtol=TOLERANCE, atol=TOLERANCE)
