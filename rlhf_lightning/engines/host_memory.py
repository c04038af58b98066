"""Host memory that tensors have freed, kept for the next ones."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
_LARGE = 1 << 30


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed tensors below 1 GiB; nothing where the C library is another.

    glibc gives large blocks back to the system at once, and the next tensor of that size is mapped anew, page
    by page: about a tenth of the time of a training step on a CPU, whose activations are such blocks.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGE - 1)
