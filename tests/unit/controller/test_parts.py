"""Batches in parts: calls go part by part without waiting, and whoever reads sees the rows in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from tensordict import TensorDict

from rlhf_lightning.controller import (
    BROADCAST,
    DP,
    MICRO_DP,
    Batch,
    PartOf,
    Parts,
    WorkerGroup,
    register,
)
from rlhf_lightning.controller.block import Block
from rlhf_lightning.controller.call import Call
from rlhf_lightning.controller.register import methods_of
from rlhf_lightning.controller.transfer import Inputs, RowTransfer
from rlhf_lightning.controller.transport import Future, Submitted
from rlhf_lightning.parallel import ParallelLayout
from tests.ray.echo import Echo
from tests.unit.controller.devices import Devices, host

ROWS = 7
TEXTS = [{"text": f"row {row}"} for row in range(ROWS)]


@dataclass(frozen=True)
class Neighbours:
    """An argument that wants rows side by side, and that could be read alone."""

    rows_together: int = 1


class Answering(Echo):
    """Answers its rows last first, some at a time."""

    def __init__(self, group: WorkerGroup | None = None) -> None:
        super().__init__(group)
        self.left = torch.empty(0, dtype=torch.int64)

    @register(transfer=MICRO_DP, reads=("number",), returns=())
    def start(self, rows: TensorDict) -> TensorDict:
        self.left = rows["number"].flip(0)
        return TensorDict({}, batch_size=rows.batch_size)

    @register(transfer=MICRO_DP, reads=(), returns=("number", "answer"))
    def go_on(self, rows: TensorDict) -> TensorDict:
        """Answer the next of them: a number times ten, in two columns."""
        now, self.left = self.left[: len(rows)], self.left[len(rows) :]
        answer = torch.stack([10 * now, 10 * now + 1], dim=1)
        return TensorDict({"number": now, "answer": answer}, batch_size=[len(now)])

    @register(transfer=DP, reads=("answer", "prompt", "rows"), returns=("total", "size"))
    def add(self, rows: TensorDict, *, by: object = None) -> TensorDict:
        """A sum over three columns, and how many rows came together."""
        texts = [int(row["text"].removeprefix("row ")) for row in rows.get("rows").tolist()]
        total = rows["answer"].sum(1) + 1000 * rows["prompt"] + 100_000 * torch.tensor(texts).view(-1)
        return TensorDict({"total": total, "size": torch.full((len(rows),), len(rows))}, [len(rows)])


def answering(replicas: int) -> Answering:
    layout, devices = ParallelLayout(d=replicas), Devices(replicas)
    for part in devices.parts:
        host(part.device, Answering(), layout)
    return Answering(WorkerGroup("echo", devices, layout, tuple(range(replicas))))


def calls(role: Echo) -> list[tuple[str, int]]:
    assert role.group is not None
    return [(report.method, report.num_rows) for report in role.group.transport.drain()]


def in_parts(role: Answering, batch: Batch, parts: int) -> Batch:
    """What `GenerationInParts` does."""
    group = role.group
    assert group is not None
    role.start(batch)
    found = []
    for index in range(parts):
        method = replace(methods_of(Answering)["go_on"], transfer=PartOf(index=index, parts=parts))
        part = group.call(method, batch, {})
        assert isinstance(part, Batch)
        found.append(part)
    numbers = Parts(tuple(part.column("number") for part in found))
    return Batch.in_parts(numbers, [part.select(["answer"]) for part in found])


def prompts(shuffled: bool) -> Batch:
    """Rows whose order is not that of the blocks that hold them."""
    order = [3, 0, 6, 1, 5, 2, 4] if shuffled else list(range(ROWS))
    back = torch.tensor(order).argsort()
    texts: list[object] = [TEXTS[row] for row in back.tolist()]
    moved = Batch.of({"prompt": back, "rows": texts}).take(order)
    return moved | {"number": torch.arange(ROWS)}


IN_THREE = [3, 3, 3, 2, 2, 2, 2]
"""Rows that come with each, where one replica hands over three parts, the last rows first."""
EXPECTED = [20 * i + 1 + 1000 * i + 100_000 * i for i in range(ROWS)]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("replicas", "parts"), [(1, 2), (2, 3), (3, 4), (2, 9)])
def test_calls_go_part_by_part_and_rows_come_back_in_order(replicas: int, parts: int, shuffled: bool) -> None:
    generator, scorer = answering(replicas), answering(2)
    batch = prompts(shuffled)
    batch |= in_parts(generator, batch, parts)
    batch |= scorer.add(batch)
    assert scorer.group is not None
    assert scorer.group.transport.fetched_bytes == 0
    assert batch["total"].tolist() == EXPECTED
    assert batch["answer"][:, 1].tolist() == [10 * i + 1 for i in range(ROWS)]
    done = calls(scorer)
    assert [method for method, _ in done] == ["add"] * 2 * parts
    assert sum(rows for _, rows in done) == ROWS


def test_views_of_a_batch_in_parts_are_those_of_an_ordered_one() -> None:
    generator = answering(2)
    batch = prompts(shuffled=True)
    batch |= in_parts(generator, batch, 3)
    batch |= generator.add(batch)
    batch = batch.renamed({"total": "sum"}).select(["sum", "answer", "number"])
    assert batch.take([6, 0, 0]).repeat(2)["sum"].tolist() == [EXPECTED[i] for i in (6, 6, 0, 0, 0, 0)]
    assert [part["sum"].tolist() for part in batch.split(3)] == [EXPECTED[:2], EXPECTED[2:4], EXPECTED[4:]]
    both = Batch.joined([batch.take([5, 1]), Batch.of({"sum": torch.tensor([7])}), batch])
    assert both["sum"].tolist() == [EXPECTED[5], EXPECTED[1], 7, *EXPECTED]
    assert both.take([2, 1, 9])["sum"].tolist() == [7, EXPECTED[1], EXPECTED[6]]


@pytest.mark.parametrize("views", [False, True])
def test_what_was_put_in_order_is_read_by_devices(views: bool) -> None:
    generator, scorer = answering(2), answering(2)
    batch = prompts(shuffled=False)
    batch |= in_parts(generator, batch, 3)
    found = scorer.add(batch.take([4, 2, 0]) if views else batch, by=Neighbours())
    assert found["total"].tolist() == ([EXPECTED[i] for i in (4, 2, 0)] if views else EXPECTED)
    assert calls(scorer) == [("add", 1), ("add", 2)] if views else [("add", 3), ("add", 4)]


def test_an_argument_that_asks_for_neighbours_is_given_all_rows() -> None:
    generator, scorer = answering(1), answering(1)
    batch = prompts(shuffled=False)
    batch |= in_parts(generator, batch, 3)
    assert scorer.add(batch, by=Neighbours())["size"].tolist() == [ROWS] * ROWS
    assert scorer.add(batch)["size"].tolist() == IN_THREE


@pytest.mark.parametrize("transfer", [BROADCAST, MICRO_DP])
def test_protocols_that_may_compare_rows_are_given_all_of_them(transfer: RowTransfer) -> None:
    generator, scorer = answering(1), answering(1)
    batch = prompts(shuffled=False)
    batch |= in_parts(generator, batch, 3)
    assert scorer.group is not None
    found = scorer.group.call(replace(methods_of(Answering)["add"], transfer=transfer), batch, {})
    assert isinstance(found, Batch)
    assert found["size"].tolist() == [ROWS] * ROWS
    assert found["total"].tolist() == EXPECTED


def test_devices_are_told_of_which_rows_and_ranks_a_call_is(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, scorer, submit = answering(1), answering(2), Devices.submit
    batch = prompts(shuffled=False)
    batch |= in_parts(generator, batch, 3)
    found: list[str] = []

    def noted(devices: Devices, device: int, call: Call, blocks: Sequence[Future | Block]) -> Submitted:
        found.append(call.scope)
        return submit(devices, device, call, blocks)

    monkeypatch.setattr(Devices, "submit", noted)
    scorer.add(batch)
    assert found == ["part"] * 6
    found.clear()
    scorer.add(batch, by=Neighbours())
    assert found == ["all"] * 2
    found.clear()
    scorer.first(number=1)
    assert found == ["some"]
    assert ("first", 0) in calls(scorer)


def test_columns_in_several_kinds_of_parts_are_read_together() -> None:
    generator, scorer = answering(1), answering(1)
    batch = prompts(shuffled=False)
    sizes = scorer.add(batch | in_parts(generator, batch, 3)).select(["size"]).renamed({"size": "prompt"})
    batch |= in_parts(generator, batch, 2)
    found = scorer.add(batch | sizes)
    assert found["total"].tolist() == [20 * i + 1 + 1000 * IN_THREE[i] + 100_000 * i for i in range(ROWS)]
    assert found["size"].tolist() == [ROWS] * ROWS


def test_what_was_put_in_order_comes_in_parts_once_more() -> None:
    generator, scorer, order = answering(1), answering(1), [5, 0, 6, 2, 1, 4, 3]
    batch = prompts(shuffled=False)
    batch |= scorer.add(batch | in_parts(generator, batch, 3)).select(["size"]).renamed({"size": "prompt"})
    again = batch.take(order) | batch.select(["number"])
    again |= in_parts(generator, again, 2)
    found = scorer.add(again)
    assert calls(scorer) == [("add", 2), ("add", 2), ("add", 3), ("add", 3), ("add", 4)]
    at = list(enumerate(order))
    assert found["total"].tolist() == [20 * i + 1 + 1000 * IN_THREE[j] + 100_000 * j for i, j in at]


@pytest.mark.parametrize(
    ("rows", "replicas", "parts"), [(7, 2, 3), (5, 3, 4), (6, 2, 4), (1, 2, 2), (0, 1, 3)]
)
def test_parts_of_each_copys_rows_are_its_rows(rows: int, replicas: int, parts: int) -> None:
    layout, inputs = ParallelLayout(d=replicas), Inputs(Batch.of({"x": torch.arange(rows)}))
    whole = MICRO_DP.distribute(layout, inputs)
    found: Mapping[int, list[int]] = {rank: [] for rank in whole}
    for index in range(parts):
        for rank, share in PartOf(index=index, parts=parts).distribute(layout, inputs).items():
            found[rank].extend(share.batch["x"].tolist())
    assert found == {rank: share.batch["x"].tolist() for rank, share in whole.items()}
