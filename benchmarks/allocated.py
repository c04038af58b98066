"""What processes have from the C library; a module of its own, which devices import."""

import ctypes
import functools
from collections.abc import Callable

from rlhf_lightning.controller import ONE_TO_ALL, register
from rlhf_lightning.workers import Actor


class MallInfo(ctypes.Structure):
    """What glibc's mallinfo2(3) returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    ]  # fmt: skip


@functools.cache  # each library loaded anew is cyclic garbage, which would look like growth
def _mallinfo2() -> Callable[[], MallInfo]:
    function = ctypes.CDLL(None).mallinfo2
    function.restype = MallInfo
    return function  # type: ignore[no-any-return]


def allocated_bytes() -> int:
    """Bytes that this process has from the C library, of all its heaps and of blocks mapped by themselves."""
    found = _mallinfo2()()
    return int(found.uordblks + found.hblkhd)


class Weighed(Actor):
    """An actor that says what its process has allocated, too."""

    @register(transfer=ONE_TO_ALL)
    def allocated(self) -> int:
        """Bytes."""
        return allocated_bytes()
