"""Sums and means over the valid entries of padded tensors, and each row's last one.

Legend: B rows, R response width; `mask` is bool, True where an entry counts. What lies under False may be
anything, inf and NaN included: it becomes 0 before any arithmetic, in the forward and in the backward pass.
Every function computes in float32 (float64 stays float64), whatever the type of its input.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def widened(x: Tensor) -> Tensor:
    """Return `x` in float32, or in float64 if it was."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def zero_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` in at least float32, exactly 0 (value and gradient) where the mask is False.

    Args:
        x: any shape, any real dtype.
        mask: the same shape, bool.

    Raises:
        ValueError: the shapes differ; broadcasting is never meant.
    """
    if x.shape != mask.shape:
        once = " Of one number a response make x[:, None] * mask." if x.shape == mask.shape[:1] else ""
        raise ValueError(
            f"a column of shape {list(x.shape)} where the mask is {list(mask.shape)}: each token has its own "
            f"number.{once}"
        )
    x = widened(x)
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def by_position(values: Tensor) -> Tensor:
    """[B, R] as [R, B], or back, for what is computed position by position.

    The numbers of a position lie side by side then; in [B, R] each lies in another line of the cache.
    """
    return values.t().contiguous()


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the valid entries of one dimension, or of all."""
    return zero_masked(x, mask).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the valid entries of one dimension, or of all; 0 where there is none."""
    total = masked_sum(x, mask, dim)
    count = mask.sum(dim)
    return total / count.clamp(min=1).to(total.dtype)


def token_mean(x: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    """Part of these rows in a metric that is a mean over tokens: their sum over `num_tokens` of all rows."""
    return masked_sum(x.detach(), mask) / max(num_tokens, 1)


def row_ends(mask: Tensor) -> Tensor:
    """[B] int64, one past the last valid place of each row of a mask [B, R]; 0 for a fully masked row."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (places * mask).amax(1) if mask.shape[1] else mask.sum(1)


def turn_ids(mask: Tensor) -> Tensor:
    """Say which of the actor's turns each token belongs to: between two turns an environment has spoken.

    Args:
        mask: [B, R] bool, the `response_mask` of drawn answers, True at the actor's tokens.

    Returns:
        [B, R] int64: 0 at the first turn's tokens, 1 at the second's, and so on; 0 where the mask is False.
    """
    begins = mask & ~pad(mask, (1, 0))[:, :-1]
    return (begins.cumsum(1) - 1) * mask


def last_valid(x: Tensor, mask: Tensor) -> Tensor:
    """Take each row's last valid entry.

    Args:
        x: [B, R].
        mask: [B, R] bool.

    Returns:
        [B] float32, 0 for a row without valid entries.
    """
    return masked_sum(x, _at_last(mask), dim=1)


def at_last_valid(x: Tensor, mask: Tensor) -> Tensor:
    """Place a row's number at its last valid entry, 0 elsewhere: an outcome score as token-level rewards.

    Args:
        x: [B].
        mask: [B, R] bool.

    Returns:
        [B, R] float32; a row without valid entries stays 0.
    """
    return zero_masked(x[:, None].expand(mask.shape), _at_last(mask))


def _at_last(mask: Tensor) -> Tensor:
    """[B, R] bool, True at the last valid entry of each row that has one."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return mask & (places == row_ends(mask)[:, None])
