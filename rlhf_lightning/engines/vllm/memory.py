"""Returns host memory of tensors to the system while the tensors stay valid: vLLM's cache on a CPU."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

from torch import Tensor

_DONT_NEED = 4
"""MADV_DONTNEED of Linux's madvise(2)."""


def release_pages(tensors: Iterable[Tensor]) -> int:
    """Return the pages of tensors to the system; they read as zeros, and get memory again when written.

    Does nothing on systems other than Linux.

    Returns:
        Bytes released.
    """
    if sys.platform != "linux":
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    storages = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}
    total = 0
    for start, size in storages.items():
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and advise(first, length, _DONT_NEED) == 0:
            total += length
    return total
