"""Calls over Ray: what travels, what the controller fetches, and how failures are named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from rlhf_lightning.controller import Batch, WorkerError
from rlhf_lightning.controller.ray_transport import RayFuture
from tests.ray.echo import Echo, numbers, started, transport_of


@pytest.fixture(scope="module")
def echo(cluster: None, module_leaves_nothing: None) -> Iterator[Echo]:
    with started(4) as role:
        yield role


@pytest.mark.parametrize(("rows", "ranks"), [(10, [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]), (2, [1, 3]), (0, [])])
def test_dp_gives_every_row_to_one_rank_and_keeps_their_order(
    echo: Echo, rows: int, ranks: list[int]
) -> None:
    batch = numbers(rows)
    answer = echo.double(batch, by=3)
    assert answer["x"].shape == (rows, 2)
    assert torch.equal(answer["x"], 3 * batch["x"])
    assert answer["rank"].tolist() == ranks


def test_rows_may_be_reordered_repeated_and_joined_before_they_come_back(echo: Echo) -> None:
    answer = echo.double(numbers(10)).take([7, 0, 0, 9])
    again = echo.double(Batch.joined([answer, numbers(2)]))
    assert again["x"][:, 0].tolist() == [56, 0, 0, 72, 0, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float64])
def test_a_column_keeps_its_type(echo: Echo, dtype: torch.dtype) -> None:
    batch = Batch.of({"x": torch.tensor([[1.0], [0.0], [1.0]]).to(dtype)})
    answer = echo.double(batch, by=True)["x"]
    assert answer.dtype == dtype
    assert answer.flatten().tolist() == [1, 0, 1]


def test_large_columns_go_through_the_object_store(echo: Echo) -> None:
    batch = Batch.of({"x": torch.arange(400_000).view(4, 100_000)})
    assert torch.equal(echo.double(echo.double(batch))["x"], 4 * batch["x"])


@pytest.mark.parametrize(("spans_nodes", "objects"), [(True, 8), (False, 4)])
def test_columns_share_an_object_only_on_one_node(
    echo: Echo, spans_nodes: bool, objects: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert transport_of(echo)._owner.spans_nodes
    monkeypatch.setattr(transport_of(echo)._owner, "spans_nodes", spans_nodes)
    answer = echo.double(numbers(10))
    pieces = [piece for name in ("x", "rank") for piece in answer.column(name).pieces]
    assert len({piece.source.ref for piece in pieces if isinstance(piece.source, RayFuture)}) == objects
    assert torch.equal(echo.double(answer | answer.take(range(10)))["x"], 4 * numbers(10)["x"])


def test_a_method_that_writes_into_its_input_is_named(echo: Echo) -> None:
    large = Batch.of({"x": torch.arange(400_000).view(4, 100_000)})
    with pytest.raises(WorkerError, match=r"^echo\[rank \d, node .*\]\.write: wrote in place .*\['x'\]"):
        print(echo.write(large)["x"])  # noqa: T201
    assert echo.ping(number=0).fetch() == [0, 1, 2, 3]


@pytest.mark.parametrize("rows", [5, 2, 0])
def test_python_objects_travel_too(echo: Echo, rows: int) -> None:
    texts: list[object] = [{"text": f"row {i}"} for i in range(rows)]
    assert echo.same(Batch.of({"texts": texts})).objects("texts") == texts


def test_all_to_all_gives_each_rank_its_own(echo: Echo) -> None:
    each: object = [4, 3, 2, 1]
    assert echo.each(number=each).fetch() == [4, 13, 22, 31]  # type: ignore[arg-type]


def test_a_chain_of_calls_brings_nothing_to_the_controller(echo: Echo) -> None:
    transport = transport_of(echo)
    before = transport.fetched_bytes
    batch = numbers(10)
    for _ in range(5):
        batch |= echo.double(batch)
    echo.total(batch)
    transport.drain()
    assert transport.fetched_bytes == before
    assert batch["x"].sum() == 32 * 190
    assert transport.fetched_bytes == before + 10 * 2 * 8


def test_drain_reports_every_call_once(echo: Echo) -> None:
    transport = transport_of(echo)
    transport.drain()
    echo.ping(number=1)
    echo.first(number=1).fetch()
    echo.sleep(seconds=0.05)
    reports = transport.drain()
    called = [("first", 0), *((name, rank) for name in ("ping", "sleep") for rank in range(4))]
    assert sorted((r.method, r.rank) for r in reports) == called
    assert {r.role for r in reports} == {"echo"}
    assert all(report.memory_bytes > 0 for report in reports)
    assert min(report.seconds for report in reports if report.method == "sleep") > 0.04
    assert transport.drain() == []


def test_a_failure_names_role_rank_and_method_wherever_it_surfaces(echo: Echo) -> None:
    transport = transport_of(echo)
    broken = echo.fail(numbers(8))
    later = echo.double(broken)
    with pytest.raises(WorkerError, match=r"^echo\[rank 1, node .*\]\.fail: broken on purpose") as caught:
        print(later["x"])  # noqa: T201
    assert "raise ValueError" in str(caught.value)
    transport.drain()
    echo.fail(numbers(8))
    with pytest.raises(WorkerError, match=r"^echo\[rank 1, node .*\]\.fail: broken on purpose"):
        transport.drain()
    assert echo.ping(number=0).fetch() == [0, 1, 2, 3]


def test_a_call_that_is_all_in_its_name_answers_and_fails_as_any_other(echo: Echo) -> None:
    transport = transport_of(echo)
    assert len(set(echo.pid().fetch())) == 4
    echo.refuse()
    with pytest.raises(WorkerError, match=r"^echo\[rank 2, node .*\]\.refuse: refused on purpose"):
        transport.drain()
    echo.pid()
    assert sorted((each.method, each.rank) for each in transport.drain()[-4:]) == [
        ("pid", r) for r in range(4)
    ]


@pytest.mark.parametrize(
    ("place", "name"), [("", "found_here"), ("beside", "found_beside"), ("newer", "examples")]
)
def test_devices_find_the_modules_that_the_controller_finds(
    place: str, name: str, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a change of sys.path, or of the current folder, in a notebook.

    The folder in which Ray was started has `examples`, too.
    """
    folder = tmp_path / place
    folder.mkdir(exist_ok=True)
    monkeypatch.setitem(sys.modules, name, sys)  # so that its end takes the module away
    del sys.modules[name]
    (folder / f"{name}.py").write_text("from tests.ray.echo import Echo\n\n\nclass Found(Echo): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place, *sys.path])
    with started(1, import_module(name).Found) as role:
        assert role.ping(number=3).fetch() == [3]
