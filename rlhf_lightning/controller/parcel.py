"""How a call travels over Ray: as bytes, beside references to the shards that hold its columns.

controller:  Packer().packed(Parcel(call, sources, objects)) --bytes--> actor.submit(bytes, *shards)
device:      deliver: blocks out of the shards -> Device.call -> report as bytes, columns as new shards
bare calls:  have neither rows nor arguments, and so need no parcel: role, rank and method are in the name of
             the Ray task; actor.ask() -> answer: Device.call -> report as bytes

A shard is one object of Ray's store with one or more columns. An object costs about a millisecond, whatever
its size: so columns that are made together share one, where all devices map the same store.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from ray import cloudpickle

from rlhf_lightning.controller.block import Block, Shard
from rlhf_lightning.controller.call import Call, CallReport
from rlhf_lightning.controller.device import Device

ShardColumn = tuple[int, str]
"""Where a device finds a block: the index of a shard that comes with the call, and the column in it."""


class Parcel(NamedTuple):
    """A call and where its blocks are.

    Example: `Parcel(call, ((0, "values"), (0, "rewards")), (("advantages", "returns"),))`.
    """

    call: Call
    sources: tuple[ShardColumn | Block, ...]
    """Where each block of `call.columns` is, in order; a small block of the controller's is sent itself."""
    objects: tuple[tuple[str, ...], ...]
    """The columns of `call.returns`, grouped by the shard that is to hold them."""

    @property
    def plain(self) -> bool:
        """Whether it holds, arguments aside, no Python objects of the user's."""
        return not any(isinstance(source, Block) and source.dtype == "object" for source in self.sources)


class Packer:
    """Packs parcels; the same arguments for many devices are packed only once."""

    def __init__(self) -> None:
        self._arguments: Mapping[str, object] = {}
        self._bytes = b""

    def packed(self, parcel: Parcel) -> bytes:
        """The parcel as bytes, in which the arguments are packed by themselves."""
        call = parcel.call
        if call.arguments is not self._arguments:
            self._arguments = call.arguments
            self._bytes = cast(bytes, cloudpickle.dumps(call.arguments)) if call.arguments else b""
        without = parcel._replace(call=call._replace(arguments={}))
        return _packed((without, self._bytes), plain=parcel.plain)


def deliver(device: Device, packed: bytes, shards: Sequence[Shard]) -> tuple[bytes | Shard, ...]:
    """Run a packed call; return its packed report, and one shard for each of `Parcel.objects`.

    Raises:
        WorkerError: the method raised.
    """
    parcel, arguments = cast(tuple[Parcel, bytes], pickle.loads(packed))  # noqa: S301 - from the controller
    call = parcel.call._replace(arguments=cloudpickle.loads(arguments)) if arguments else parcel.call
    blocks = [s if isinstance(s, Block) else shards[s[0]][s[1]] for s in parcel.sources]
    report, *columns = device.call(call, *blocks)
    made = {name: b for name, b in zip(call.returns, columns, strict=True) if isinstance(b, Block)}
    return _reported(report), *({name: made[name] for name in names} for names in parcel.objects)


def task_name(call: Call) -> str:
    """The name of a bare call's Ray task, which its process shows while it runs: `DeviceActor.actor.0.x`."""
    return f"DeviceActor.{call.role}.{call.rank}.{call.method}"


def answer(device: Device, name: str) -> bytes:
    """Run a bare call; return its packed report.

    Args:
        device: the device that runs it.
        name: the name of the Ray task, made by `task_name`.

    Raises:
        WorkerError: the method raised.
    """
    role, rank, method = name.split(".")[1:]
    return _reported(device.call(Call(role, method, int(rank), 0, (), {}, ()))[0])


def _reported(report: CallReport | Block) -> bytes:
    assert isinstance(report, CallReport)
    values = report.value.values() if type(report.value) is dict else [report.value]
    plain = all(value is None or type(value) in (bool, int, float, str) for value in values)
    return _packed(report, plain=plain)


def opened(packed: bytes) -> CallReport:
    """The report that `deliver` packed."""
    return cast(CallReport, cloudpickle.loads(packed))


def _packed(message: tuple[Parcel, bytes] | CallReport, *, plain: bool) -> bytes:
    """Pickle a message; with cloudpickle, which is slower, where it may hold the user's own classes.

    Args:
        message: what to pack.
        plain: it holds no classes or functions of the user's script, which would have to go by value.
    """
    return pickle.dumps(message) if plain else cast(bytes, cloudpickle.dumps(message))
