"""Runs that repeat bit by bit: what a device's process has to be told."""

from __future__ import annotations

import os
import random
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

Deterministic = bool | Literal["warn"]
"""As of Lightning's `Trainer`: refuse operations without a deterministic version, or only warn of them."""
_BLOCK = 256
"""Numbers whose sums up to each are one product."""


def be_deterministic(mode: Deterministic, *, seed: int) -> None:
    """Use deterministic operations only in this process from now on, and seed its generators.

    Nothing here draws from those: it is for what a loss or a reward function of a user does.

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
    """What this process has been told, by Lightning's `--trainer.deterministic` on the controller."""
    if not torch.are_deterministic_algorithms_enabled():
        return False
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else True


def cumulated(x: Tensor) -> Tensor:
    """Sums up to each place of the last dimension, in float64.

    On a GPU torch has no deterministic scan of floats: where it is told to be, they are matrix products.
    """
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return cumulated_by_products(x.double())
    return x.cumsum(-1, dtype=torch.float64)


def cumulated_by_products(x: Tensor) -> Tensor:
    """The same of [..., n] float64: within blocks first, and then what stands before each block."""
    size = x.shape[-1]
    width = min(_BLOCK, size)
    blocks = torch.unflatten(pad(x, (0, -size % width)), -1, (-1, width))
    within = blocks @ x.new_ones(width, width).triu()
    if within.shape[-2] > 1:
        totals = within[..., -1]
        within = within + (cumulated_by_products(totals) - totals)[..., None]
    return within.flatten(-2)[..., :size]
