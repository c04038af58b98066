"""Sends weights from a device of one model to the devices of another, bucket by bucket.

one device of the source          every device of the target
weights ─> [ bucket ] ── header, then numbers: one broadcast ──> [ bucket ] ─> named views ─> the model
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 256 * 2**20
"""Least capacity of a bucket; a larger parameter makes it grow."""

Header = tuple[torch.dtype, list[tuple[str, tuple[int, ...]]]]
"""What a bucket holds: dtype, and (name, shape) of its tensors in order; no tensors mark the end."""


@dataclass(frozen=True)
class Moved:
    """What one end of a link moved in one transfer of all weights."""

    sent_bytes: int = 0
    """Bytes sent, counted once for each receiver."""
    bucket_bytes: int = 0
    """Size of the largest bucket: the most memory that the transfer took beside the models."""


@dataclass(frozen=True)
class Link:
    """One device's end of a link between two models; made once, with the job's process groups."""

    group: dist.ProcessGroup
    """The sending device and the receiving ones."""
    source: int
    """Global rank of the sending device."""
    device: torch.device
    """This rank's device."""

    def send(self, weights: Iterable[tuple[str, Tensor]], *, bucket_bytes: int = BUCKET_BYTES) -> Moved:
        """Send all weights; the source calls it while the other devices `receive`.

        Args:
            weights: (name, tensor) pairs of one dtype; each tensor is read before the next is asked for.
            bucket_bytes: bytes of tensors that are sent together.
        """
        receivers = dist.get_world_size(self.group) - 1
        total = largest = 0
        for header, numbers in _buckets(weights, bucket_bytes, self.device):
            self._tell(header)
            dist.broadcast(numbers, self.source, group=self.group)
            total += numbers.nbytes * receivers
            largest = max(largest, numbers.nbytes)
            del numbers  # or the bucket could not grow without a second one beside it
        self._tell((torch.float32, []))
        return Moved(sent_bytes=total, bucket_bytes=largest)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the source sends, (name, tensor), each valid until the next; must be read to the end."""
        room = torch.empty(0, device=self.device)
        while True:
            dtype, parts = self._tell(None)
            if not parts:
                return
            sizes = [prod(shape) for _, shape in parts]
            if sum(sizes) > room.numel():
                room = torch.empty(sum(sizes), dtype=dtype, device=self.device)
            numbers = room[: sum(sizes)]
            dist.broadcast(numbers, self.source, group=self.group)
            for (name, shape), part in zip(parts, numbers.split(sizes), strict=True):
                yield name, part.view(shape)

    def _tell(self, header: Header | None) -> Header:
        """Broadcast the source's header, and return it on every device; the others pass None."""
        told: list[Header | None] = [header]
        dist.broadcast_object_list(told, self.source, group=self.group, device=torch.device("cpu"))
        assert told[0] is not None
        return told[0]


def _buckets(
    weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, device: torch.device
) -> Iterator[tuple[Header, Tensor]]:
    """Copy the weights into buckets: the header of each, and its numbers [N].

    The memory of a bucket is reused for the next one.
    """
    room = torch.empty(0, device=device)
    parts: list[tuple[str, tuple[int, ...]]] = []
    used = 0
    for name, value in weights:
        if parts and used + value.numel() > room.numel():
            yield (room.dtype, parts), room[:used]
            parts, used = [], 0
        if value.numel() > room.numel():
            room = room.new_empty(0)  # freed before the larger one is made
            count = max(bucket_bytes // value.element_size(), value.numel())
            room = torch.empty(count, dtype=value.dtype, device=device)
        room[used : used + value.numel()].view(value.shape).copy_(value)
        parts.append((name, tuple(value.shape)))
        used += value.numel()
    if parts:
        yield (room.dtype, parts), room[:used]
