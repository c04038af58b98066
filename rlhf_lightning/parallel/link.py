"""Weights on their way from the devices of one model to those of another, bucket by bucket.

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
"""Least that a bucket has room for; a larger parameter makes it larger."""

Header = tuple[torch.dtype, list[tuple[str, tuple[int, ...]]]]
"""Type and (name, shape) of what a bucket holds, one behind the other; empty at the end."""


@dataclass(frozen=True)
class Moved:
    """What one end of a link did for all weights."""

    sent_bytes: int = 0
    """Counted once for each receiver."""
    received_bytes: int = 0
    bucket_bytes: int = 0
    """The largest bucket: all that was held of the weights at once, beside the models."""


@dataclass(frozen=True)
class Link:
    """One device's end of the way from a model to another; made once, with the job's groups."""

    group: dist.ProcessGroup
    """The device that sends and those that receive."""
    source: int
    """Global rank of the one that sends."""
    device: torch.device
    """Of this rank."""

    def send(self, weights: Iterable[tuple[str, Tensor]], *, bucket_bytes: int = BUCKET_BYTES) -> Moved:
        """Give all weights to the other devices; the source calls it, while they `receive`.

        Args:
            weights: name and tensor, of one type, each only needed until the next.
            bucket_bytes: numbers that travel together.
        """
        receivers = dist.get_world_size(self.group) - 1
        total = largest = 0
        for dtype, parts, numbers in _buckets(weights, bucket_bytes, self.device):
            self._tell((dtype, parts))
            dist.broadcast(numbers, self.source, group=self.group)
            total += numbers.nbytes * receivers
            largest = max(largest, numbers.nbytes)
        self._tell((torch.float32, []))
        return Moved(sent_bytes=total, bucket_bytes=largest)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """What the source sends, name and tensor, each only valid until the next; read it to the end."""
        room = torch.empty(0, device=self.device)
        while True:
            dtype, parts = self._tell(None)
            if not parts:
                return
            sizes = [prod(shape) for _, shape in parts]
            if sum(sizes) > room.numel() or dtype != room.dtype:
                room = torch.empty(sum(sizes), dtype=dtype, device=self.device)
            numbers = room[: sum(sizes)]
            dist.broadcast(numbers, self.source, group=self.group)
            for (name, shape), part in zip(parts, numbers.split(sizes), strict=True):
                yield name, part.view(shape)

    def _tell(self, header: Header | None) -> Header:
        """The source's header, on every device."""
        told: list[Header | None] = [header]
        dist.broadcast_object_list(told, self.source, group=self.group, device=torch.device("cpu"))
        assert told[0] is not None
        return told[0]


def _buckets(
    weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, device: torch.device
) -> Iterator[tuple[torch.dtype, list[tuple[str, tuple[int, ...]]], Tensor]]:
    """Copies of the weights in one piece of memory after the other: type, names and shapes, numbers [N].

    The memory is used again for the next bucket.
    """
    room = torch.empty(0, device=device)
    parts: list[tuple[str, tuple[int, ...]]] = []
    used = 0
    for name, value in weights:
        if parts and used + value.numel() > room.numel():
            yield room.dtype, parts, room[:used]
            parts, used = [], 0
        if value.numel() > room.numel():
            room = room.new_empty(0)  # freed before the larger one is made
            count = max(bucket_bytes // value.element_size(), value.numel())
            room = torch.empty(count, dtype=value.dtype, device=device)
        room[used : used + value.numel()].view(value.shape).copy_(value)
        parts.append((name, tuple(value.shape)))
        used += value.numel()
    if parts:
        yield room.dtype, parts, room[:used]
