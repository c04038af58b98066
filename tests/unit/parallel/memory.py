"""Bytes that a forked rank holds and receives, as the interpreter and the kernel count them."""

from __future__ import annotations

import gc
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType

import torch
from torch import Tensor

_TCP_INFO = struct.Struct("=128xQ")
"""Linux' struct tcp_info up to tcpi_bytes_received."""


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of every piece of memory behind these tensors."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def live_tensors() -> list[Tensor]:
    """All tensors that Python knows and that were made after `gc.freeze()`."""
    return [found for found in gc.get_objects() if isinstance(found, Tensor)]


def live_bytes() -> int:
    """Bytes behind `live_tensors`."""
    return sum(storages(live_tensors()).values())


def settles_at(size_bytes: int) -> bool:
    """Whether `live_bytes` comes to this; see `settles`."""
    return settles(lambda: live_bytes() == size_bytes)


def settles(holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold within 5 s: a thread of gloo lets go of a tensor after its wait."""
    deadline = time.monotonic() + 5
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Peak:
    """The most that was alive whenever a module called, or came back from, anything within the block."""

    def __init__(self, module: ModuleType) -> None:
        self._name, self.size_bytes = module.__name__, 0

    def __enter__(self) -> Peak:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if frame.f_globals["__name__"] == self._name and event.startswith("c_"):
            self.size_bytes = max(self.size_bytes, live_bytes())


def received_bytes() -> int:
    """What has arrived at the TCP sockets of this process since each was opened."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as open_socket:
                info = open_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:  # no TCP, or the descriptor that the listing itself used
            continue
        total += _TCP_INFO.unpack(info)[0]
    return total


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held_by_process() -> dict[str, int]:
    """What a transition must not add to: groups, threads and open files."""
    return {
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }
