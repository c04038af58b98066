"""Keeps memory that tensors on the host have freed for the next ones, in the training engines on a CPU."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
_LARGE = 1 << 30


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed tensors below 1 GiB; does nothing without glibc.

    By default glibc returns large blocks to the system at once, and the next tensor of that size is mapped
    page by page. Activations are such blocks: it takes about a tenth of a training step on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGE - 1)
