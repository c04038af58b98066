"""The actor's transition from training shards to generation shards and back, holding each number once.

training                        gather                                 generation
own chunk  ── copied into ──> [ own | remote ]  <── micro-DP group     all of it computes; the parameters
parameter.data ──────────────── a view of it                           that train are views of it
                                release
own chunk  <── copied out ─── [ own | remote ]  ──> freed

It goes bucket by bucket: while one is being exchanged, this rank's part of the next is copied. So the peak of
memory is the generation shard and the largest training parameter (with gloo, also its all-gathers' buffers).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_lightning.parallel.buckets import Slot, buckets, param_of, stored_as
from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.parallel.sharding import Sharded

IN_FLIGHT = 2
"""Buckets being exchanged at the same time."""


@dataclass(eq=False)
class HybridBuffer:
    """One rank's parameters: in training its training shard, in generation the larger shard that contains it.

    The `nn.Parameter` objects stay the same, only their `.data` moves. A parameter divided along dimension 1
    lies transposed in memory, in training too, so that its strides never change.
    """

    params: Sequence[Sharded]
    """All parameters of the model."""
    stages: Sequence[Sequence[int]]
    """Layers of each training stage."""
    layout: ParallelLayout
    """Training, and generation by HybridFlow's rule."""
    _: KW_ONLY
    rank: int
    """Within the layout."""
    group: dist.ProcessGroup
    """The rank's micro-DP group, ranks in the order of the micro index."""
    parameters: Mapping[str, nn.Parameter]
    """This rank's training shards by name, in the shape `Sharded.shard_shape(t)`."""
    received_bytes: int = field(default=0, init=False)
    """Bytes that the last `gather` received from other ranks."""

    def __post_init__(self) -> None:
        at = self.layout.generating.coordinate(self.rank)
        self._member = at.micro
        self._buckets = buckets(self.params, self.stages, self.layout.generating, stage=at.p)
        self._stores: dict[str, Tensor] = {}
        with torch.inference_mode(mode=False):
            for param in self.params:
                if (parameter := self.parameters.get(param.name)) is not None:
                    parameter.data = param_of(param, stored_as(param, parameter.data).contiguous())

    @property
    def size_bytes(self) -> int:
        """Bytes of memory of the parameters and the generation shard; shared memory counts once."""
        tensors = [*self._stores.values(), *(parameter.data for parameter in self.parameters.values())]
        return storage_bytes(tensors)

    def gather(self) -> dict[str, Tensor]:
        """Make the generation shard; collective over the micro-DP group.

        Returns:
            The tensors by name. A divided tensor has the ranks' chunks in order along `dim`, each chunk with
            all its sections. Drop them before `release`, which otherwise cannot free the memory.
        """
        self.received_bytes = 0
        shard: dict[str, Tensor] = {}
        running: deque[list[dist.Work]] = deque()
        with torch.inference_mode(mode=False):  # the parameters are to be trained again
            for bucket in self._buckets:
                works = []
                for slot in bucket:
                    store = self._store(slot)
                    self.received_bytes += store[0].nbytes * len(slot.missing(self._member))
                    works += exchange(slot, store, member=self._member, group=self.group)
                    shard |= slot.tensors(store)
                running.append(works)
                if len(running) > IN_FLIGHT:
                    _wait(running.popleft())
            for works in running:
                _wait(works)
        return shard

    def release(self) -> None:
        """Free the other ranks' parts; this rank's part moves into memory of its own."""
        with torch.inference_mode(mode=False):
            for slot in self._slots():
                store = self._stores.pop(slot.params[0].name, None)
                trained = self._trained(slot)
                if store is not None and trained is not None:
                    _, parameter = trained
                    parameter.data = parameter.data.clone()  # strides stay

    def _slots(self) -> Iterable[Slot]:
        return (slot for bucket in self._buckets for slot in bucket)

    def _trained(self, slot: Slot) -> tuple[Sharded, nn.Parameter] | None:
        """The parameter of a slot that this rank trains."""
        return next(((q, self.parameters[q.name]) for q in slot.params if q.name in self.parameters), None)

    def _store(self, slot: Slot) -> Tensor:
        """The memory of a slot, `[pieces, *stored]`, of which this rank's parameter is a view."""
        trained = self._trained(slot)
        if trained is not None and not slot.missing(self._member):
            return stored_as(trained[0], trained[1].data).unsqueeze(0)
        like = next(iter(self.parameters.values())).data
        store, own = like.new_empty((len(slot.owners), *slot.stored)), slot.own(self._member)
        self._stores[slot.params[0].name] = store
        if trained is not None and own is not None:
            param, parameter = trained
            parameter.data = param_of(param, store[own]).copy_(parameter.data)
        return store


def exchange(slot: Slot, store: Tensor, *, member: int, group: dist.ProcessGroup) -> list[dist.Work]:
    """Start the communication that fills a slot's memory; collective over the micro-DP group.

    Args:
        slot: the slot to fill.
        store: its memory [pieces, *slot.stored], with this rank's piece in place.
        member: this rank's index in the group.
        group: the micro-DP group, in the order of the members.
    """
    if slot.how == "nothing":
        return []
    if slot.how == "gather":
        work = dist.all_gather_single(store.flatten(), store[member].flatten(), group=group, async_op=True)
        return [_started(work)]
    if slot.how == "broadcast":
        works = [
            dist.broadcast(piece, group=group, async_op=True, group_src=owner)
            for piece, (owner,) in zip(store, slot.owners, strict=True)
        ]
        return [_started(work) for work in works]
    operations = []
    for piece, sender, receiver in slot.routes:
        if sender == member:
            operations.append(dist.P2POp(dist.isend, store[piece], group=group, group_peer=receiver))
        elif receiver == member:
            operations.append(dist.P2POp(dist.irecv, store[piece], group=group, group_peer=sender))
    return dist.batch_isend_irecv(operations) if operations else []


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors; shared memory counts once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()
