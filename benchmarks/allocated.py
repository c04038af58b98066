"""What processes have from the C library; a module of its own, which devices import."""

import ctypes

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


def allocated_bytes() -> int:
    """Bytes that this process has from the C library, of all its heaps and of blocks mapped by themselves."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


class Weighed(Actor):
    """An actor that says what its process has allocated, too."""

    @register(transfer=ONE_TO_ALL)
    def allocated(self) -> int:
        """Bytes."""
        return allocated_bytes()
