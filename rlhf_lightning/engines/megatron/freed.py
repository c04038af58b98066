"""Memory of zeros that is given back, and not kept anywhere meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlhf_lightning.engines.offload import storages


class Freed:
    """Tensors of zeros without memory until `restore`; as `Parked`, with nothing on the host.

    Args:
        tensors: views of one storage are freed together.
    """

    size_bytes = 0

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._freed = [(storage, storage.nbytes()) for storage in storages(tensors)]
        for storage, _ in self._freed:
            storage.resize_(0)

    def restore(self) -> None:
        """Make them again."""
        for storage, size in self._freed:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        self._freed.clear()
