"""Parcels: a call as bytes finds its blocks, and its columns are grouped into shards as asked."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import cast

import pytest
import torch
from ray import cloudpickle

from rlhf_lightning.controller.block import Block, Shard, decode, encode
from rlhf_lightning.controller.call import Call, ColumnInput
from rlhf_lightning.controller.device import Device
from rlhf_lightning.controller.parcel import Packer, Parcel, answer, deliver, opened, task_name, unpacked
from rlhf_lightning.parallel import ParallelLayout
from tests.ray.echo import Echo
from tests.unit.controller.devices import host


@pytest.fixture
def device() -> Device:
    found = Device(0)
    host(found, Echo(), ParallelLayout())
    return found


def double(*picks: slice, by: object) -> Call:
    rows = sum(pick.stop - pick.start for pick in picks)
    return Call("echo", "double", 0, rows, (ColumnInput("x", picks),), {"by": by}, ("x", "rank"))


@pytest.mark.parametrize("objects", [(("x", "rank"),), (("x",), ("rank",)), (("rank", "x"),)])
def test_columns_come_in_the_shards_that_were_asked_for(
    device: Device, objects: tuple[tuple[str, ...], ...]
) -> None:
    value = torch.arange(4)
    parcel = Parcel(double(slice(1, 3), by=2), ((0, "y"),), objects)
    given = [{"x": encode(value), "y": encode(value + 10)}]
    report, *shards = deliver(device, Packer().packed(parcel), given)
    assert opened(cast(bytes, report)).method == "double"
    assert [tuple(cast(Shard, shard)) for shard in shards] == list(objects)
    found = {name: block for shard in shards for name, block in cast(Shard, shard).items()}
    assert cast(torch.Tensor, decode([found["x"]])).tolist() == [22, 24]


def test_small_blocks_of_the_controller_come_along(device: Device) -> None:
    parcel = Parcel(
        double(slice(0, 1), slice(2, 4), by=1), (encode(torch.tensor([7, 8])), (0, "x")), (("x",), ("rank",))
    )
    _, shard, _ = deliver(device, Packer().packed(parcel), [{"x": encode(torch.arange(4))}])
    assert cast(torch.Tensor, decode([cast(Shard, shard)["x"]])).tolist() == [7, 2, 3]


def test_a_plain_value_needs_no_shard(device: Device) -> None:
    parcel = Parcel(Call("echo", "ping", 0, 0, (), {"number": 4}, ()), (), ())
    (report,) = deliver(device, Packer().packed(parcel), [])
    assert opened(cast(bytes, report)).value == 4


@pytest.mark.parametrize(
    "given", [threading.Lock(), (number for number in range(2))], ids=["lock", "generator"]
)
def test_an_argument_that_cannot_be_sent_is_told_with_its_call(given: object) -> None:
    call = Call("echo", "ping", 0, 0, (), {"number": 4, "by": given}, ())
    with pytest.raises(
        ValueError, match=r"^echo\.ping: of its arguments number, by, one .*: cannot pickle '"
    ):
        Packer().packed(Parcel(call, (), ()))


def test_a_call_of_a_part_arrives_as_one(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Call] = []

    def keep(call: Call, blocks: object) -> tuple[object, list[Block]]:
        found.append(call)
        return 0, []

    monkeypatch.setattr(device, "_run", keep)
    call = Call("echo", "ping", 0, 0, (), {"number": 4}, (), "part")
    deliver(device, Packer().packed(Parcel(call, (), ())), [])
    assert found == [call]


def test_a_call_without_rows_arguments_or_columns_is_all_in_its_name(device: Device) -> None:
    name = task_name(Call("echo", "pid", 0, 0, (), {}, ()))
    assert opened(answer(device, name)).value == os.getpid()


@pytest.mark.parametrize(
    "call",
    [
        Call("echo", "ping", 0, 0, (), {"number": 4}, ()),
        Call("echo", "total", 0, 2, (ColumnInput("x", (slice(0, 2),)),), {}, ()),
        Call("echo", "total", 0, 0, (ColumnInput("x", ()),), {}, ()),
        Call("echo", "double", 0, 0, (), {}, ("x",)),
        Call("echo", "pid", 0, 0, (), {}, (), "some"),
    ],
)
def test_every_other_call_needs_its_message(call: Call) -> None:
    assert not call.bare
    assert Call("echo", "pid", 0, 0, (), {}, ()).bare


def test_an_argument_of_a_class_that_only_this_script_knows_goes_by_value(device: Device) -> None:
    @dataclass
    class Twice:
        def __rmul__(self, other: torch.Tensor) -> torch.Tensor:
            return other + other

    parcel = Parcel(double(slice(0, 2), by=Twice()), (encode(torch.tensor([1, 2])),), (("x", "rank"),))
    _, shard = deliver(device, Packer().packed(parcel), [])
    assert cast(torch.Tensor, decode([cast(Shard, shard)["x"]])).tolist() == [2, 4]


def test_a_row_or_a_result_of_such_a_class_goes_by_value_too(device: Device) -> None:
    @dataclass
    class Mine:
        number: int

        def __add__(self, rank: int) -> dict[str, object]:
            return {"mine": Mine(self.number + rank)}

    texts = Call("echo", "same", 0, 1, (ColumnInput("texts", (slice(0, 1),)),), {}, ("texts",))
    parcel = Parcel(texts, (encode([Mine(3)]),), (("texts",),))
    _, shard = deliver(device, Packer().packed(parcel), [])
    assert repr(decode([cast(Shard, shard)["texts"]])).endswith("Mine(number=3)]")
    ping = Parcel(Call("echo", "ping", 0, 0, (), {"number": Mine(4)}, ()), (), ())
    (report,) = deliver(device, Packer().packed(ping), [])
    assert repr(opened(cast(bytes, report)).value).endswith("Mine(number=4)}")


def test_a_class_of_a_script_or_of_a_registered_module_goes_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = ModuleType("mine")
    exec("class Row(str): pass", vars(mine))  # noqa: S102 - a module that only this process has
    ping = Call("echo", "same", 0, 1, (ColumnInput("texts", (slice(0, 1),)),), {}, ("texts",))

    def size() -> int:
        return len(Packer().packed(Parcel(ping, (encode([vars(mine)["Row"]("x")]),), (("texts",),))))

    monkeypatch.setitem(sys.modules, "mine", mine)
    by_name = size()
    cloudpickle.register_pickle_by_value(mine)
    try:
        assert size() > 2 * by_name
    finally:
        cloudpickle.unregister_pickle_by_value(mine)
    monkeypatch.setitem(sys.modules, "__main__", mine)
    mine.__name__ = vars(mine)["Row"].__module__ = "__main__"
    assert size() > 2 * by_name


class Counted:
    """Knows how often it was pickled."""

    looks = 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        Counted.looks += 1
        return Counted, ()


def test_arguments_of_one_call_are_packed_once_for_all_ranks() -> None:
    packer, arguments = Packer(), {"loss": Counted()}

    def packed(rank: int, arguments: Mapping[str, object]) -> bytes:
        return packer.packed(Parcel(Call("echo", "ping", rank, 0, (), arguments, ()), (), ()))

    assert packed(0, arguments) != packed(1, arguments)
    assert Counted.looks == 1
    packed(0, {"loss": Counted()})
    assert Counted.looks == 2
    assert packed(0, {"weights": torch.zeros(2)}) != packed(0, {"weights": torch.ones(2)})
    assert packed(0, {}) == Packer().packed(Parcel(Call("echo", "ping", 0, 0, (), {}, ()), (), ()))


class Refusing:
    """Cannot be pickled until it is ready."""

    ready = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        if not self.ready:
            raise RuntimeError("not ready")
        return Refusing, ()


def test_arguments_that_could_not_be_packed_are_not_taken_for_those_before() -> None:
    packer, one = Packer(), Refusing()
    call = Call("echo", "ping", 0, 0, (), {"number": one}, ())
    packer.packed(Parcel(call._replace(arguments={"number": 3}), (), ()))
    with pytest.raises(RuntimeError, match="not ready"):
        packer.packed(Parcel(call, (), ()))
    one.ready = True
    assert isinstance(unpacked(packer.packed(Parcel(call, (), ()))).call.arguments["number"], Refusing)
