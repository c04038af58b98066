"""Returns host memory of tensors to the system while the tensors stay valid: vLLM's cache on a CPU."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor

from rlhf_lightning.engines.offload import storages


def release_pages(tensors: Iterable[Tensor]) -> None:
    """Return the pages of tensors to the system; they read as zeros, and get memory again when written."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for storage in storages(tensors):
        start = storage.data_ptr()
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            advise(first, length, mmap.MADV_DONTNEED)
