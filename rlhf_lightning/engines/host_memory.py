"""Memory that tensors on the host have freed: kept for the next ones, and given back now and then."""

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
    library = ctypes.CDLL(None)  # what this process has loaded
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGE - 1)


def give_back_freed_memory() -> None:
    """Return what this process keeps of freed memory to the system; does nothing without glibc.

    Batches of other lengths leave holes, which would stay for good. The next step takes a tenth longer, since
    it has to map its memory again.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))
