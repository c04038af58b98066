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
from rlhf_lightning.controller.call import Call, CallReport, ColumnInput
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


class Packer:
    """Packs parcels; the same arguments for many devices are packed only once.

    A parcel goes as tuples without names, which take half the time of named ones to pack.
    """

    def __init__(self) -> None:
        self._arguments: Mapping[str, object] = {}
        self._bytes = b""

    def packed(self, parcel: Parcel) -> bytes:
        """The parcel as bytes, in which the arguments are packed by themselves.

        Raises:
            ValueError: an argument cannot be pickled.
        """
        call = parcel.call
        if call.arguments is not self._arguments:
            self._bytes = _arguments(call) if call.arguments else b""
            self._arguments = call.arguments
        columns = [tuple(column) for column in call.columns]
        return _packed((call[:4], columns, self._bytes, call[6:], *parcel[1:]))


def deliver(device: Device, packed: bytes, shards: Sequence[Shard]) -> tuple[bytes | Shard, ...]:
    """Run a packed call; return its packed report, and one shard for each of `Parcel.objects`.

    Raises:
        WorkerError: the method raised.
    """
    parcel = unpacked(packed)
    blocks = [s if isinstance(s, Block) else shards[s[0]][s[1]] for s in parcel.sources]
    report, *columns = device.call(parcel.call, *blocks)
    made = {name: b for name, b in zip(parcel.call.returns, columns, strict=True) if isinstance(b, Block)}
    return _packed(report), *({name: made[name] for name in names} for names in parcel.objects)


def unpacked(packed: bytes) -> Parcel:
    """The parcel that a `Packer` packed."""
    fields, columns, given, (returns, scope), sources, objects = pickle.loads(packed)  # noqa: S301
    role, method, rank, num_rows = fields
    inputs = tuple(ColumnInput(*column) for column in columns)
    arguments = cloudpickle.loads(given) if given else {}
    return Parcel(Call(role, method, rank, num_rows, inputs, arguments, returns, scope), sources, objects)


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
    return _packed(device.call(Call(role, method, int(rank), 0, (), {}, ()))[0])


def opened(packed: bytes) -> CallReport:
    """The report that `deliver` packed."""
    return cast(CallReport, cloudpickle.loads(packed))


def _arguments(call: Call) -> bytes:
    """The arguments of a call as bytes; refuses those that cannot be."""
    try:
        return cast(bytes, cloudpickle.dumps(call.arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as err:
        raise ValueError(
            f"{call.role}.{call.method}: of its arguments {', '.join(call.arguments)}, one cannot go to "
            f"another process: {err}. Create it within the method, from values that the method is given."
        ) from err


def _packed(message: object) -> bytes:
    """Pickle a message; with cloudpickle, which is slower, where the user's own classes go by value."""
    try:
        found = pickle.dumps(message)
    except (pickle.PicklingError, AttributeError, TypeError):
        found = b""  # a class that no module holds
    own = not found or b"__main__" in found or cloudpickle.list_registry_pickle_by_value()
    return cast(bytes, cloudpickle.dumps(message)) if own else found
