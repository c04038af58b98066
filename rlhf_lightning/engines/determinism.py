"""Runs that repeat bit by bit: settings of a device's process, and cumulative sums that are deterministic."""

from __future__ import annotations

import os
import random
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

Deterministic = bool | Literal["warn"]
"""As in Lightning's `Trainer`: refuse operations without a deterministic version, or only warn of them."""
_BLOCK = 256
"""Numbers whose cumulative sums are one matrix product."""


def be_deterministic(mode: Deterministic, *, seed: int) -> None:
    """Use only deterministic operations in this process from now on, and seed its generators.

    This package does not draw from these generators: they are for losses and reward functions of users.

    Args:
        mode: False changes nothing.
        seed: of torch, NumPy and `random`.
    """
    if not mode:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
    torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
    torch.backends.cudnn.benchmark = False
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def deterministic_here() -> Deterministic:
    """The mode of this process; on the controller, that of Lightning's `--trainer.deterministic`."""
    if not torch.are_deterministic_algorithms_enabled():
        return False
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else True


def cumulated(x: Tensor) -> Tensor:
    """Cumulative sums along the last dimension, in float64.

    On a GPU torch has no deterministic scan of floats; in deterministic mode they are matrix products.
    """
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return cumulated_by_products(x.double())
    return x.cumsum(-1, dtype=torch.float64)


def cumulated_by_products(x: Tensor) -> Tensor:
    """Cumulative sums of [..., n] float64: within blocks, plus the total of all blocks before."""
    size = x.shape[-1]
    width = min(_BLOCK, size)
    blocks = torch.unflatten(pad(x, (0, -size % width)), -1, (-1, width))
    within = blocks @ x.new_ones(width, width).triu()
    if within.shape[-2] > 1:
        totals = within[..., -1]
        within = within + (cumulated_by_products(totals) - totals)[..., None]
    return within.flatten(-2)[..., :size]
