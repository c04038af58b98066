"""Moves the memory of tensors to the host and back while every reference to the tensors stays valid."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlhf_lightning.engines.optimizer import local


class Parked:
    """Storages whose bytes wait on the host.

    Resizing a storage to 0 frees the device and keeps tensors, views and optimizer state as objects. Whoever
    reads them before `restore` reads nothing, so their owner must refuse.

    Args:
        tensors: whole or sharded; views of one storage move together.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._parked = [(storage, _on_host(storage)) for storage in storages(tensors)]
        for storage, _ in self._parked:
            storage.resize_(0)

    @property
    def size_bytes(self) -> int:
        """Bytes on the host."""
        return sum(host.nbytes() for _, host in self._parked)

    def restore(self) -> None:
        """Put the bytes back."""
        for storage, host in self._parked:
            storage.resize_(host.nbytes())
            storage.copy_(host)
        self._parked.clear()


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind the tensors, each once."""
    found = {}
    for tensor in tensors:
        storage = local(tensor.detach()).untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage
    return list(found.values())


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    return copy.copy_(storage)


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes behind the tensors, what they share counted once."""
    return sum(storage.nbytes() for storage in storages(tensors))
