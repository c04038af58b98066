"""Calls of a role in this process: what is fetched, what is refused, and how failures are named."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from rlhf_lightning.controller import DP, DP_METRIC, Batch, Metrics, WorkerError, WorkerGroup, register
from rlhf_lightning.controller.block import Block
from rlhf_lightning.controller.device import Device
from rlhf_lightning.controller.in_process import InProcessTransport
from rlhf_lightning.controller.worker_group import INLINE_BYTES
from rlhf_lightning.functional import PolicyLoss
from rlhf_lightning.parallel import ParallelLayout
from tests.ray.echo import Echo, numbers
from tests.unit.controller.devices import host


class Careless(Echo):
    """A role that does what a role must not."""

    @register(transfer=DP, reads=("x",), returns=("x",))
    def replace(self, rows: TensorDict) -> TensorDict:
        """Put another tensor into the dictionary, which is allowed."""
        rows["x"] = rows["x"] + 1
        return rows

    @register(transfer=DP, reads=("x",), returns=("x", "y"))
    def forget(self, rows: TensorDict) -> TensorDict:
        return rows

    @register(transfer=DP, reads=("x",), returns=("double",))
    def misspell(self, rows: TensorDict) -> TensorDict:
        """Return the column by another name."""
        return TensorDict({"doubled": 2 * rows["x"], "also": rows["x"]}, batch_size=len(rows))

    @register(transfer=DP, reads=("x",), returns=("x",))
    def peek(self, rows: TensorDict) -> TensorDict:
        """Read a column that it does not name."""
        return TensorDict({"x": rows["x"] + rows["y"]}, batch_size=len(rows))

    @register(transfer=DP, reads=("x",), returns=("x",))
    def drop(self, rows: TensorDict) -> TensorDict:
        return rows[1:]

    @register(transfer=DP, reads=("x",), returns=("x",))
    def number(self, rows: TensorDict) -> TensorDict:
        return 3  # type: ignore[return-value]

    @register(transfer=DP_METRIC, reads=("x",))
    def measure(self, rows: TensorDict) -> Mapping[str, float]:
        """Give a number for each row."""
        return {"x/mean": rows["x"]}

    @register(transfer=DP_METRIC, reads=("x",))
    def omit(self, rows: TensorDict) -> Mapping[str, float]:
        return None  # type: ignore[return-value]

    @register(transfer=DP_METRIC)
    def look(self, batch: TensorDict) -> Mapping[str, float]:
        return {"columns": len(list(batch.keys()))}

    @register(transfer=DP_METRIC)
    def think(self, steps: int) -> Mapping[str, float]:
        return {"steps": steps}

    @register(transfer=DP_METRIC)
    def see(self, rows: TensorDict, *, by: object) -> Mapping[str, float]:
        """Read whatever is there."""
        return {"columns": len(list(rows.keys()))}

    @register(transfer=DP, reads=("x",), returns=("x",))
    def single(self, rows: TensorDict) -> TensorDict:
        """Return one number for all rows."""
        return {"x": rows["x"].sum()}  # type: ignore[return-value]

    @register(transfer=DP, reads=("x",), returns=("x",))
    def fill(self, rows: TensorDict) -> TensorDict:
        """Ask for more than there is."""
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    @register(transfer=DP, reads=("x",), returns=("x",))
    def gather(self, rows: TensorDict) -> TensorDict:
        """Let NCCL ask for more than there is."""
        raise dist.DistBackendError("NCCL error in: x.cpp\nLast error:\nCuda failure 2 'out of memory'")

    @register(transfer=DP, reads=("x",), returns=("x",))
    def lose(self, rows: TensorDict) -> TensorDict:
        """Lose a peer."""
        raise dist.DistBackendError("NCCL error in: x.cpp\nncclRemoteError")


@pytest.fixture
def role() -> Careless:
    device, layout = Device(0), ParallelLayout()
    host(device, Careless(), layout)
    return Careless(WorkerGroup("echo", InProcessTransport(device), layout, (0,)))


def test_a_chain_fetches_only_what_is_read(role: Careless) -> None:
    assert role.group is not None
    batch = numbers(5)
    for _ in range(3):
        batch |= role.double(batch)
    assert role.group.transport.fetched_bytes == 0
    assert batch["x"].tolist() == (8 * numbers(5)["x"]).tolist()
    assert role.group.transport.fetched_bytes == 5 * 2 * 8


def test_a_large_column_goes_with_its_batch(role: Careless) -> None:
    batch = numbers(INLINE_BYTES)
    block = batch.column("x").pieces[0].source
    assert isinstance(block, Block)
    doubled, seen = role.double(batch), weakref.ref(block)
    assert doubled["x"][1].tolist() == [4, 6]
    del batch, block
    assert seen() is None


def test_drain_reports_every_call_once(role: Careless) -> None:
    assert role.group is not None
    role.double(numbers(2))
    role.ping(number=1)
    reports = role.group.transport.drain()
    assert [(r.role, r.method, r.rank) for r in reports] == [("echo", "double", 0), ("echo", "ping", 0)]
    assert role.group.transport.drain() == []


@pytest.mark.parametrize("batch", [numbers(4), Batch.joined([numbers(1), numbers(3)])])
def test_a_method_that_writes_into_its_input_is_refused(role: Careless, batch: Batch) -> None:
    with pytest.raises(WorkerError, match=r"echo\[rank 0, .*\].write: wrote in place .*\['x'\].*clone"):
        role.write(batch)


def test_a_device_without_memory_says_what_takes_less(role: Careless) -> None:
    with pytest.raises(WorkerError, match=r"\.fill: CUDA out.* 2\.00 GiB\. Try --algo\.actor\.dtype .*\.\n"):
        role.fill(numbers(3))


def test_memory_that_nccl_lacks_is_a_devices_too(role: Careless) -> None:
    with pytest.raises(WorkerError, match=r"\.gather: NCCL[^T]*'out of memory' Try --algo"):
        role.gather(numbers(3))
    with pytest.raises(WorkerError, match=r"\.lose: NCCL error in: x.cpp\nncclRemoteError\n"):
        role.lose(numbers(3))


def test_a_method_may_put_new_tensors_into_its_rows(role: Careless) -> None:
    batch = numbers(3)
    assert torch.equal(role.replace(batch)["x"], batch["x"] + 1)
    assert batch["x"].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("forget", r"declares the columns \('x', 'y'\) but returned no \['y'\]; it has \['x'\]\."),
        ("misspell", r"declares the columns .* returned no \['double'\]; it has \['also', 'doubled'\]\."),
        ("drop", r"was given 4 rows and returned columns of other lengths: \{'x': 3\}"),
        ("number", r"returned int, not the columns \('x',\) that it declares"),
        ("single", r"returned one number as column 'x': give one for each row\."),
    ],
)
def test_results_that_are_not_as_declared_are_refused(role: Careless, method: str, message: str) -> None:
    with pytest.raises(WorkerError, match=rf"^echo\[rank 0, node .*\]\.{method}: {message}"):
        getattr(role, method)(numbers(4))


def test_metrics_that_are_none_are_refused_by_the_device(role: Careless) -> None:
    with pytest.raises(WorkerError, match=r"\]\.measure: metric 'x/mean': tensor.* is not a single number\."):
        role.measure(numbers(4))
    with pytest.raises(WorkerError, match=r"\]\.omit: returned NoneType, not metrics, numbers by name\."):
        role.omit(numbers(4))


def test_a_missing_column_is_named_before_anything_is_sent(role: Careless) -> None:
    with pytest.raises(ValueError, match=r"echo.double reads the columns \['x'\], and the batch has no"):
        role.double(Batch.of({"y": torch.zeros(3)}))


def test_a_column_that_a_method_reads_and_does_not_name_is_told_of(role: Careless) -> None:
    batch = numbers(4) | {"y": torch.ones(4, 2)}
    named = r"\(it is given the columns that its reads=\('x',\) names\)\n"
    with pytest.raises(WorkerError, match=rf"\.peek: KeyError: 'key \"y\" not found [^\n]* {named}"):
        role.peek(batch)


class Nowhere:
    """No number."""

    def __add__(self, other: object) -> int:
        """Look something up."""
        raise KeyError("nowhere")


def test_a_failure_carries_the_original_traceback(role: Careless) -> None:
    with pytest.raises(WorkerError, match=r"\.each: can only concatenate str") as caught:
        role.each(number=["text"])  # type: ignore[arg-type]
    assert "return number + 10 * self.rank" in str(caught.value)
    with pytest.raises(WorkerError, match=r"\.each: KeyError: 'nowhere'"):
        role.each(number=[Nowhere()])  # type: ignore[arg-type]


def test_python_objects_reach_the_worker(role: Careless) -> None:
    texts: list[object] = [{"row": i} for i in range(3)]
    assert role.same(Batch.of({"texts": texts})).objects("texts") == texts


def test_what_is_not_rows_is_given_by_name(role: Careless) -> None:
    double = cast(Callable[..., Batch], role.double)
    for given in [(numbers(2), 3), (numbers(2), numbers(2)), (3,)]:
        with pytest.raises(
            TypeError, match=r"Careless\.double: a remote call takes its rows.* are rows, by\."
        ):
            double(*given)
    with pytest.raises(TypeError, match="a remote call takes its rows"):
        double(numbers(2), by=numbers(2))


def test_arguments_are_looked_at_before_anything_is_sent(role: Careless) -> None:
    double = cast(Callable[..., Batch], role.double)
    with pytest.raises(TypeError, match=r"^Careless\.double: missing a required argument: 'rows'\. Its par"):
        double()
    with pytest.raises(TypeError, match=r"^Careless\.double: .* unexpected keyword argument 'twice'\. Its"):
        double(numbers(1), twice=True)
    with pytest.raises(TypeError, match=r"by=PolicyLoss is a class\. Give one of it, by=PolicyLoss\(\)"):
        double(numbers(1), by=PolicyLoss)


def test_a_method_of_all_columns_is_asked_what_any_other_is(role: Careless) -> None:
    batch = numbers(4) | {"group_ids": torch.tensor([0, 0, 1, 2])}
    assert role.see(batch, by=Pairs()).fetch() == {"columns": 2.0}
    with pytest.raises(
        ValueError, match=r"^echo\.see reads the columns \['y'\], and the batch has no \['y'\]"
    ):
        role.see(batch, by=Pairs(columns=("y",), rows_together=1))
    with pytest.raises(
        ValueError, match=r"^echo\.see compares 2 neighbouring rows at a time, and 1 of 2 such"
    ):
        role.see(batch, by=Pairs(rows_together=2))
    with pytest.raises(
        ValueError, match=r"^echo\.see compares 3 neigh.* 4 rows are no whole groups of 3: 1 are left over"
    ):
        role.see(numbers(4), by=Pairs(rows_together=3))


@dataclass(frozen=True)
class Pairs:
    """An argument that reads columns, of rows that stand side by side."""

    columns: tuple[str, ...] = ("x",)
    rows_together: int = 1
    returns: float = 0.5
    """Its own number: only of a call that returns rows would it be the names of columns."""


@pytest.mark.parametrize(
    ("columns", "advice"),
    [
        (("y",), "Call what makes them first."),
        (("row_ids",), "The data gives 'row_ids': batch.select([..., 'row_ids'])."),
        (("row_ids", "rows"), "The data gives 'row_ids' and 'rows': batch.select([..., 'row_ids', 'rows'])."),
    ],
)
def test_what_the_data_gives_is_to_be_taken_along(
    role: Careless, columns: tuple[str, ...], advice: str
) -> None:
    with pytest.raises(ValueError, match=rf"it has \['x'\]\. {re.escape(advice)}$"):
        role.see(numbers(4), by=Pairs(columns=columns))


def test_rows_come_by_their_name(role: Careless) -> None:
    with pytest.raises(
        TypeError, match=r"^Careless\.look: its rows come by the name `rows`, .* are batch\.$"
    ):
        role.look(numbers(2))
    think = cast(Callable[..., Metrics], role.think)
    assert think(steps=3).fetch() == {"steps": 3.0}

    def other(self: Careless, batch: TensorDict) -> TensorDict:
        return batch

    with pytest.raises(
        ValueError, match=r"other: it reads \('x',\) of its rows, .* Write def other\(self, rows\)\."
    ):
        cast(Any, register)(transfer=DP, reads=("x",), returns=("x",))(other)


def test_a_column_alone_is_no_list_of_columns(role: Careless) -> None:
    double = cast(Callable[..., Batch], role.double)
    with pytest.raises(ValueError, match=r"^Reading\.columns='x': .* letter by letter\. Write \('x',\)"):
        double(numbers(1), by=Reading())


class Reading:
    """An argument that names the columns that it reads as a text."""

    columns = "x"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"transfer": DP}, r": its result is rows, .* Name them: returns=\(.*\), or take DP_METRIC"),
        ({"transfer": DP, "returns": "x"}, r"\.returns='x': "),
        ({"transfer": DP_METRIC, "reads": "x"}, r"\.reads='x': "),
    ],
)
def test_what_a_method_reads_and_returns_is_looked_at_where_it_is_made(
    options: dict[str, Any], said: str
) -> None:
    def halve(self: Careless, rows: TensorDict) -> TensorDict:
        return rows

    with pytest.raises(ValueError, match=rf"halve{said}"):
        cast(Any, register)(**options)(halve)


def test_rows_of_here_and_of_devices_go_on_together(role: Careless) -> None:
    mixed = Batch.joined([numbers(1), role.double(numbers(2)), numbers(1)])
    assert role.double(mixed)["x"].tolist() == [[0, 2], [0, 4], [8, 12], [0, 2]]


def test_a_handle_of_a_run_that_is_over_says_so(role: Careless) -> None:
    assert role.group is not None
    doubled = role.double(numbers(2))
    role.group.transport.close()
    with pytest.raises(
        WorkerError, match=r"^echo\.double: the run is over, and its devices went with it\. C"
    ):
        role.double(numbers(2))
    assert doubled["x"].tolist() == [[0, 2], [4, 6]]
