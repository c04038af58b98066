"""How a call travels over Ray: as bytes, beside references to the shards that hold its columns.

controller:  Parcel(call, sources, objects).packed() --bytes--> actor.submit(bytes, *shards)
device:      deliver: blocks out of the shards -> Device.call -> report as bytes, columns as new shards

Ray hands bytes over as they are, and an object of the store costs about a millisecond whatever its size: so
columns that are made together share an object, where all devices map the same store.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ray import cloudpickle

from rlhf_lightning.controller.block import Block, Shard
from rlhf_lightning.controller.call import Call, CallReport
from rlhf_lightning.controller.device import Device

Place = tuple[int, str]
"""Where a device finds a block: the number of a shard that comes with the call, and the column in it."""


@dataclass(frozen=True)
class Parcel:
    """A call and where its blocks are.

    Example: `Parcel(call, ((0, "values"), (0, "rewards")), (("advantages", "returns"),))`.
    """

    call: Call
    sources: tuple[Place | Block, ...]
    """One for each block of `call.columns`, in order; a small one of the controller's comes along itself."""
    objects: tuple[tuple[str, ...], ...]
    """The columns of `call.returns`, by the shard that is to hold them."""

    def packed(self) -> bytes:
        """As bytes."""
        return _packed(self, plain=not self.call.arguments and not self._brings_blocks())

    def _brings_blocks(self) -> bool:
        return any(isinstance(source, Block) for source in self.sources)


def deliver(device: Device, packed: bytes, shards: Sequence[Shard]) -> tuple[bytes | Shard, ...]:
    """Run a packed call; return its packed report, and one shard for each of `Parcel.objects`.

    Raises:
        WorkerError: the method raised.
    """
    parcel: Parcel = cloudpickle.loads(packed)
    blocks = [s if isinstance(s, Block) else shards[s[0]][s[1]] for s in parcel.sources]
    report, *columns = device.call(parcel.call, *blocks)
    made = {
        name: block
        for name, block in zip(parcel.call.returns, columns, strict=True)
        if isinstance(block, Block)
    }
    assert isinstance(report, CallReport)
    plain = report.value is None or isinstance(report.value, int | float | str)
    return _packed(report, plain=plain), *({name: made[name] for name in names} for names in parcel.objects)


def opened(packed: bytes) -> CallReport:
    """The report that `deliver` packed."""
    return cast(CallReport, cloudpickle.loads(packed))


def _packed(message: Parcel | CallReport, *, plain: bool) -> bytes:
    """As bytes; a class or function of the user's script goes by value, which costs time to look for.

    Args:
        message: what to pack.
        plain: nothing of the user's is in it.
    """
    return pickle.dumps(message) if plain else cast(bytes, cloudpickle.dumps(message))
