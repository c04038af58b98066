"""Tensors that ranks may have divided (torch's DTensor): this rank's part, and the whole."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(tensor: Tensor) -> Tensor:
    """The whole of a divided tensor, one mesh axis after the other; collective. Others are returned as is."""
    found = tensor.detach()
    if not isinstance(found, DTensor):
        return found
    placements = list(found.placements)
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        found = found.redistribute(placements=placements)
    return found.full_tensor()
