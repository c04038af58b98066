"""What methods are given and return is the same whatever the placement: nobody else's memory or objects."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from rlhf_lightning.controller import DP, Batch, WorkerError, WorkerGroup, register
from rlhf_lightning.controller.block import encode
from rlhf_lightning.controller.call import Call, ColumnInput
from rlhf_lightning.controller.device import Device
from rlhf_lightning.controller.register import Worker
from rlhf_lightning.parallel import ParallelLayout
from tests.ray.echo import Echo
from tests.unit.controller.devices import Devices, host


class Keeping(Echo):
    """A role that keeps what it has returned."""

    def __init__(self, group: WorkerGroup | None = None) -> None:
        super().__init__(group)
        self.sums = torch.zeros(2)
        self.log: list[list[int]] = [[], []]

    @register(transfer=DP, reads=("n",), returns=("total", "log"))
    def count(self, rows: TensorDict) -> TensorDict:
        """Sums so far, and what they were made of."""
        self.sums += rows["n"]
        for kept, number in zip(self.log, rows["n"].tolist(), strict=True):
            kept.append(number)
        return {"total": self.sums, "log": self.log}  # type: ignore[return-value]

    @register(transfer=DP, reads=("n",), returns=("n",))
    def change(self, rows: TensorDict) -> TensorDict:
        """Write into what is frozen, and is no role."""
        ParallelLayout().p = 2  # type: ignore[misc]
        return rows

    @register(transfer=DP, reads=("n",), returns=("n",))
    def resize(self, rows: TensorDict, *, size: int) -> TensorDict:
        return TensorDict({"n": torch.zeros(size)}, batch_size=size)

    @register(transfer=DP, reads=("n",), returns=("hits",))
    def find(self, rows: TensorDict) -> TensorDict:
        """Lists of as many numbers, which tensordict makes a tensor of where they are equally long."""
        return TensorDict({"hits": [list(range(k)) for k in rows["n"].tolist()]}, batch_size=len(rows))

    @register(transfer=DP, reads=("n",), returns=("grade",))
    def grade(self, rows: TensorDict) -> TensorDict:
        return TensorDict({"grade": [float(k) if k else None for k in rows["n"].tolist()]}, [len(rows)])

    @register(transfer=DP, reads=("rows",), returns=("seen",))
    def mark(self, rows: TensorDict) -> TensorDict:
        """Note in each row how often it was seen."""
        raw = cast(list[dict[str, int]], rows["rows"])
        for row in raw:
            row["seen"] = row.get("seen", 0) + 1
        return TensorDict({"seen": torch.tensor([row["seen"] for row in raw])}, batch_size=len(rows))

    @register(transfer=DP, reads=("n",), returns=("hits",))
    def list_hits(self, rows: TensorDict) -> TensorDict:
        """The documented way."""
        items = [list(range(k)) for k in rows["n"].tolist()]
        return TensorDict({"hits": NonTensorStack(*items)}, batch_size=len(rows))


def keeping(ranks: int) -> Keeping:
    """The role on devices of its own."""
    layout, devices = ParallelLayout(d=ranks), Devices(ranks)
    for part in devices.parts:
        host(part.device, Keeping(), layout)
    return Keeping(WorkerGroup("echo", devices, layout, tuple(range(ranks))))


def test_what_a_method_returned_stays_as_it_was() -> None:
    role, batch = keeping(1), Batch.of({"n": torch.tensor([1, 2])})
    first, second = role.count(batch), role.count(batch)
    assert first["total"].tolist() == [1, 2]
    assert second["total"].tolist() == [2, 4]
    assert first.objects("log") == [[1], [2]]
    assert second.objects("log") == [[1, 1], [2, 2]]


def test_a_device_knows_how_much_a_call_made() -> None:
    device = Device(0)
    host(device, Keeping(), ParallelLayout())
    columns = (ColumnInput("n", (slice(0, 2),)),)
    device.call(Call("echo", "count", 0, 2, columns, {}, ("total",)), encode(torch.tensor([1, 2])))
    assert device.made == {"echo.count": 8}


class Scoring(Echo):
    """Scores with a module that turns gradients off and sets a type, as scripts do in their first lines."""

    def __init__(self, group: WorkerGroup | None = None) -> None:
        super().__init__(group)
        self.found: list[bool] = []
        self.types: list[torch.dtype] = []

    def build(self, worker: Worker) -> None:
        self.types.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)

    @register(transfer=DP, reads=("n",), returns=("n",))
    def judge(self, rows: TensorDict) -> TensorDict:
        self.found.append(torch.is_grad_enabled())
        self.types.append(torch.get_default_dtype())
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float16)
        return rows


def test_a_method_that_turns_gradients_off_does_so_for_itself_alone() -> None:
    device, role = Device(0), Scoring()
    host(device, role, ParallelLayout())
    call = Call("echo", "judge", 0, 1, (ColumnInput("n", (slice(0, 1),)),), {}, ("n",))
    with torch.no_grad():
        for _ in range(2):
            device.call(call, encode(torch.tensor([1])))
    assert role.found == [True, True]


def test_a_default_type_that_a_role_or_the_controller_sets_reaches_no_other_call() -> None:
    device, role, found = Device(0), Scoring(), list[torch.dtype]()
    call = Call("echo", "judge", 0, 1, (ColumnInput("n", (slice(0, 1),)),), {}, ("n",))
    before = torch.get_default_dtype()
    try:
        for given in (torch.float32, torch.bfloat16):
            torch.set_default_dtype(given)
            host(device, role, ParallelLayout())
            found.append(torch.get_default_dtype())
            device.call(call, encode(torch.tensor([1])))
            found.append(torch.get_default_dtype())
    finally:
        torch.set_default_dtype(before)
    assert found == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    assert role.types == [torch.float32] * 4


@pytest.mark.parametrize("size", [1, 3])
def test_fewer_or_more_rows_than_were_given_are_refused(size: int) -> None:
    role, batch = keeping(1), Batch.of({"n": torch.tensor([1, 2])})
    with pytest.raises(WorkerError, match=rf"was given 2 rows and returned .* lengths: {{'n': {size}}}\."):
        role.resize(batch, size=size)


def test_what_is_frozen_and_no_role_is_not_said_to_be_one() -> None:
    role, batch = keeping(1), Batch.of({"n": torch.tensor([1])})
    with pytest.raises(WorkerError, match="cannot assign to field 'p'") as told:
        role.change(batch)
    assert "its fields are options" not in str(told.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_method_may_write_into_raw_rows_which_answers_share(ranks: int) -> None:
    raw = [{"prompt": "a"}, {"prompt": "b"}]
    rows: list[object] = [raw[0], raw[0], raw[0], raw[1], raw[1], raw[1]]
    role, batch = keeping(ranks), Batch.of({"rows": rows})
    for _ in range(2):
        assert role.mark(batch)["seen"].tolist() == [1] * 6
    assert raw == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lengths", [[2, 2, 2, 3], [2, 3, 2, 2], [3, 2, 1, 0]])
def test_lists_of_numbers_come_back_row_by_row(lengths: list[int], ranks: int) -> None:
    found = keeping(ranks).find(Batch.of({"n": torch.tensor(lengths)})).objects("hits")
    assert all(isinstance(item, torch.Tensor) for item in found)
    assert [cast(torch.Tensor, item).tolist() for item in found] == [[*range(n)] for n in lengths]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("numbers", [[1, 1, 1, 0], [1, 0, 1, 1], [0, 1, 1, 1]])
def test_numbers_beside_none_come_back_as_numbers(numbers: list[int], ranks: int) -> None:
    found = keeping(ranks).grade(Batch.of({"n": torch.tensor(numbers)})).objects("grade")
    assert found == [float(n) if n else None for n in numbers]
    assert {type(item) for item in found} == {float, type(None)}


@pytest.mark.parametrize("lengths", [[2, 2, 3, 3], [2, 2, 2, 2]])
def test_objects_that_are_returned_as_such_need_no_luck(lengths: list[int]) -> None:
    batch = Batch.of({"n": torch.tensor(lengths)})
    for ranks in (1, 2, 5):
        assert keeping(ranks).list_hits(batch).objects("hits") == [[*range(n)] for n in lengths]
    with pytest.raises(
        ValueError, match=r"column 'hits' differ .* return it as .*: NonTensorStack\(\*items\)\."
    ):
        keeping(2).find(Batch.of({"n": torch.tensor([2, 2, 3, 3])})).objects("hits")
