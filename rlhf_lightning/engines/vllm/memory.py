"""Memory of the host given back to the system while the tensors that lie in it stay."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

from torch import Tensor

_DONT_NEED = 4
"""MADV_DONTNEED of Linux's madvise(2)."""


def forget(tensors: Iterable[Tensor]) -> int:
    """Give the pages of tensors back, which then hold zeros; memory comes again as it is written.

    Nothing happens where the system is not Linux.

    Returns:
        Bytes of the pages.
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
