"""HybridFlow-V's transition to generation, for comparison: every rank gathers the whole model.

The vanilla rule numbers the shards of generation consecutively, so that a rank's training shard need not be a
part of what it generates with: the model is gathered within the training replica, the generation shard is cut
out of it as a copy, and the training shard stays beside it (HybridFlow section 5.3, Table 2).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.parallel.buckets import Slot, buckets, param_of, stored_as
from rlhf_lightning.parallel.layout import Generation
from rlhf_lightning.parallel.sharding import holds
from rlhf_lightning.parallel.transition import HybridBuffer, exchange


class GatheredShard(HybridBuffer):
    """One rank's parameters under the vanilla rule: it generates with a copy; `parameters` stay as they are.

    `group` is the rank's training replica, stage by stage.
    """

    def __post_init__(self) -> None:
        everything = replace(self.layout, generation=Generation(1, 1)).generating
        self._member = everything.coordinate(self.rank).micro
        self._buckets = buckets(self.params, self.stages, everything, stage=0)
        self._chunks = self._wanted()
        self._stores: dict[str, Tensor] = {}

    def gather(self) -> dict[str, Tensor]:
        """Make the generation shard as `HybridBuffer.gather` does; all ranks of the replica call it."""
        self.received_bytes = 0
        stores: list[Tensor] = []
        works: list[dist.Work] = []
        with torch.inference_mode(mode=False):
            for slot in self._slots():
                store = self._store(slot)
                self.received_bytes += store[0].nbytes * len(slot.missing(self._member))
                works += exchange(slot, store, member=self._member, group=self.group)
                stores.append(store)
            while works:  # a work holds its tensors
                works.pop(0).wait()
            for slot in reversed(list(self._slots())):
                self._cut(slot, stores.pop())
        return dict(self._stores)

    def release(self) -> None:
        """Free the copy."""
        self._stores.clear()

    def _wanted(self) -> dict[str, slice]:
        """What the rank generates with: which training chunks of which parameters."""
        generating = self.layout.generating
        at, each = generating.coordinate(self.rank), self.layout.t // generating.t
        joined = self.layout.p // generating.p
        stages = range(at.p * joined, (at.p + 1) * joined)
        mine = [q for q in self.params if any(holds(q, self.stages, stage) for stage in stages)]
        return {param.name: slice(at.t * each, (at.t + 1) * each) for param in mine}

    def _store(self, slot: Slot) -> Tensor:
        """Memory for all pieces of a slot, `[pieces, *stored]`, the own one filled in."""
        like = next(iter(self.parameters.values())).data
        store, own = like.new_empty((len(slot.owners), *slot.stored)), slot.own(self._member)
        if (trained := self._trained(slot)) is not None and own is not None:
            param, parameter = trained
            store[own] = stored_as(param, parameter.data)
        return store

    def _cut(self, slot: Slot, store: Tensor) -> None:
        """Copy what the rank generates with out of a slot's memory."""
        pieces = store.unflatten(0, (len(slot.params), -1))
        for param, whole in zip(slot.params, pieces, strict=True):
            if param.name in self._chunks:
                cut = whole[0] if param.dim is None else whole[self._chunks[param.name]].flatten(0, 1)
                self._stores[param.name] = param_of(param, cut.clone())
