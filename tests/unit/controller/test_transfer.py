"""Transfer protocols: which rank is given which rows, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from tensordict import TensorDict

from rlhf_lightning.controller import (
    BROADCAST,
    DP,
    DP_METRIC,
    MICRO_DP,
    PP_ONLY,
    Batch,
    Inputs,
    Metrics,
    RowTransfer,
    WorkerError,
    WorkerGroup,
    register,
)
from rlhf_lightning.controller.block import Block
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.controller.in_process import InProcessTransport
from rlhf_lightning.controller.transfer import Outputs, RankInputs, Transfer
from rlhf_lightning.controller.transport import Future
from rlhf_lightning.parallel import Generation, ParallelLayout, World
from rlhf_lightning.parallel.layout import Order
from tests.ray.echo import Echo, numbers
from tests.unit.controller.devices import Devices, echo_on, host


@dataclass(frozen=True)
class Dealt(RowTransfer):
    """Rows are dealt out like cards, and come back in their order."""

    def distribute(self, layout: ParallelLayout, inputs: Inputs) -> RankInputs:
        hands = [range(rank, len(inputs.batch), layout.num_ranks) for rank in range(layout.num_ranks)]
        return {rank: replace(inputs, batch=inputs.batch.take(hand)) for rank, hand in enumerate(hands)}

    def collect(self, layout: ParallelLayout, outputs: Outputs) -> Batch:
        joined = Batch.joined([outputs[rank].batch for rank in sorted(outputs)])
        dealt = [row for rank in sorted(outputs) for row in range(rank, len(joined), layout.num_ranks)]
        return joined.take([dealt.index(row) for row in range(len(joined))])


class Dealer(Echo):
    """A role with a method under the user's protocol."""

    @register(transfer=Dealt(), reads=("x",), returns=("x", "rank"))
    def deal(self, rows: TensorDict) -> TensorDict:
        return self.seen(rows)

    @register(transfer=MICRO_DP, reads=("x",), returns=("x", "rank"))
    def answer(self, rows: TensorDict) -> TensorDict:
        return self.seen(rows)

    @register(transfer=BROADCAST, reads=("x",), returns=("x", "rank"))
    def whole(self, rows: TensorDict) -> TensorDict:
        return self.seen(rows)

    @register(transfer=PP_ONLY)
    def stage(self) -> int:
        return self.rank

    @register(transfer=DP_METRIC, reads=("x",))
    def which(self, rows: TensorDict) -> Mapping[str, float]:
        return {"rank": float(self.rank)}


def dealer_on(layout: ParallelLayout) -> Dealer:
    """The role with the user's protocol, where `echo_on` puts the plain one."""
    group = echo_on(layout).group
    assert group is not None
    assert isinstance(group.transport, Devices)
    for part in group.transport.parts:
        host(part.device, Dealer(), layout)
    return Dealer(group)


def test_dp_gives_all_ranks_of_a_replica_the_same_rows() -> None:
    layout = ParallelLayout(p=2, t=2, d=3)
    shards = DP.distribute(layout, Inputs(numbers(7)))
    sizes = {layout.coordinate(rank).d: set[int]() for rank in shards}
    for rank, inputs in shards.items():
        sizes[layout.coordinate(rank).d].add(len(inputs.batch))
    assert sizes == {0: {2}, 1: {2}, 2: {3}}
    assert len(shards) == 12


@dataclass(frozen=True)
class Pairs:
    """An argument that compares neighbours."""

    columns: tuple[str, ...] = ("x",)
    rows_together: int = 2


@pytest.mark.parametrize("transfer", [DP, DP_METRIC, MICRO_DP])
def test_rows_that_an_argument_compares_stay_on_one_rank(transfer: Transfer) -> None:
    layout = ParallelLayout(d=4)
    one = Pairs(rows_together=1)
    for by, sizes in ((Pairs(), [2, 2, 2, 4]), (one, [2, 3, 2, 3])):
        shares = transfer.distribute(layout, Inputs(numbers(10), {"by": by, "beside": one}))
        assert sorted(len(share.batch) for share in shares.values()) == sorted(sizes)


@pytest.mark.parametrize("layout", [ParallelLayout(d=3), ParallelLayout(p=2, t=2, d=2), ParallelLayout(t=2)])
def test_dp_takes_the_rows_of_the_output_ranks(layout: ParallelLayout) -> None:
    batch = numbers(7)
    answer = echo_on(layout).double(batch, by=3)
    assert torch.equal(answer["x"], 3 * batch["x"])
    assert sorted(set(answer["rank"].tolist())) == layout.output_ranks


@pytest.mark.parametrize("order", ["tpd", "tdp"])
def test_broadcast_takes_the_rows_of_the_first_output_rank(order: Order) -> None:
    """Whose stage is the last: those before it know nothing of what the model says."""
    layout = ParallelLayout(p=3, t=2, d=2, order=order)
    answer = dealer_on(layout).whole(numbers(5))
    assert torch.equal(answer["x"], numbers(5)["x"])
    assert answer["rank"].tolist() == [layout.output_ranks[0]] * 5


def test_dp_metric_averages_over_the_output_ranks() -> None:
    role = dealer_on(ParallelLayout(t=2, d=2))
    assert role.total(numbers(4)).fetch() == {"total": (6 + 22) / 2}
    assert role.which(numbers(4)).fetch() == {"rank": (0 + 2) / 2}


def test_metrics_of_many_calls_are_fetched_in_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    fetch = InProcessTransport.fetch

    def counted(transport: InProcessTransport, futures: Sequence[Future]) -> list[object]:
        waits.append(len(futures))
        return fetch(transport, futures)

    role = dealer_on(ParallelLayout(t=2, d=2))
    many = role.total(numbers(4)) | role.which(numbers(4)).moved("group", to="other") | {"mine": 1.0}
    monkeypatch.setattr(InProcessTransport, "fetch", counted)
    assert many.fetch() == {"total": 14.0, "rank": 1.0, "mine": 1.0}
    assert waits == [4]


def test_metrics_average_over_calls_where_names_meet() -> None:
    first = Metrics([[{"a": 1.0, "b": 2.0}, {"a": 3.0}]])
    assert (first | Metrics.of({"a": 6.0, "c": 1.0})).fetch() == {"a": 4.0, "b": 2.0, "c": 1.0}
    with pytest.raises(
        TypeError, match=r"^metrics\['a'\]: wait for them first, metrics\.fetch\(\)\.get\('a'"
    ):
        _ = first["a"]
    with pytest.raises(TypeError, match=r"do not go into a plain dict: begin with Metrics\.of\(numbers\)"):
        dict(first)  # type: ignore[call-overload]


def test_of_a_learning_rate_and_a_count_the_last_call_says_it() -> None:
    steps = [(1e-6, 0.0), (2e-6, 0.0), (3e-6, 1.0)]
    calls = Metrics([[{"a/lr": lr, "a/skipped_steps": n, "a/grad_norm": n}] * 2 for lr, n in steps])
    moved = calls.moved("a", to="b").fetch()
    assert moved == {"b/lr": 3e-6, "b/skipped_steps": 1.0, "b/grad_norm": pytest.approx(1 / 3)}
    assert ({"a/lr": 9.0, "x": 1.0} | calls).moved("a", to="b").fetch() == moved | {"x": 1.0}
    assert (calls | {"a/lr": 9.0}).fetch()["a/lr"] == 9.0


@pytest.mark.parametrize("number", ["much", torch.ones(2), [1.0]])
def test_what_is_no_number_is_no_metric(number: float) -> None:
    with pytest.raises(TypeError, match=r"^metric 'mine': .* is not a single number\. Give its mean"):
        Metrics.of({"mine": number})


def test_plain_values_for_all_for_each_and_for_the_first() -> None:
    role = echo_on(ParallelLayout(d=3))
    assert role.ping(number=5).fetch() == [5, 6, 7]
    each: object = [3, 2, 1]
    assert role.each(number=each).fetch() == [3, 12, 21]  # type: ignore[arg-type]
    assert role.first(number=9).fetch() == (0, 9)
    assert len(role.ping(number=0)) == 3


@pytest.mark.parametrize("wrong", [7, [1, 2], [1, 2, 3, 4]])
def test_all_to_all_refuses_anything_but_a_value_a_rank(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"ALL_TO_ALL over 3 ranks.*not: \['number'\]"):
        echo_on(ParallelLayout(d=3)).each(number=wrong)  # type: ignore[arg-type]


def test_a_protocol_of_a_user_splits_and_joins_its_own_way() -> None:
    role = dealer_on(ParallelLayout(d=3))
    assert role.last(numbers(4))["rank"].tolist() == [2] * 4
    answer = role.deal(numbers(7))
    assert torch.equal(answer["x"], numbers(7)["x"])
    assert answer["rank"].tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        # Figure 8: (1, 4, 2) -> (1, 2) generates on 02 13 46 57.
        (ParallelLayout(1, 4, 2, generation=Generation(1, 2)), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (ParallelLayout(1, 4, 2, generation=Generation(1, 2, "vanilla")), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (ParallelLayout(2, 2, 1, generation=Generation(1, 1)), [[0], [1], [2], [3]]),
        (ParallelLayout(2, 1, 2, "tdp", Generation(1, 1)), [[0], [2], [1], [3]]),
        (ParallelLayout(2, 2, 2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (ParallelLayout(d=3), [[0], [1], [2]]),
    ],
)
def test_micro_dp_splits_over_the_copies_that_generate(
    layout: ParallelLayout, copies: list[list[int]]
) -> None:
    batch = numbers(11)
    shards = MICRO_DP.distribute(layout, Inputs(batch))
    parts = batch.split(len(copies))
    for ranks, part in zip(copies, parts, strict=True):
        for rank in ranks:
            assert torch.equal(shards[rank].batch["x"], part["x"])
    answer = dealer_on(layout).answer(batch)
    assert torch.equal(answer["x"], batch["x"])
    firsts = [ranks[0] for ranks, part in zip(copies, parts, strict=True) for _ in range(len(part))]
    assert answer["rank"].tolist() == firsts


def test_pp_only_takes_one_value_a_stage() -> None:
    assert dealer_on(ParallelLayout(p=3, t=2, d=2)).stage().fetch() == [0, 2, 4]
    assert dealer_on(ParallelLayout(p=3, t=2, d=2, order="tdp")).stage().fetch() == [0, 4, 8]


def test_large_blocks_are_shared_and_small_ones_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    role, shared = echo_on(ParallelLayout(d=2)), list[Block]()
    assert role.group is not None

    def noted(block: Block) -> Block:
        shared.append(block)
        return block

    monkeypatch.setattr(role.group.transport, "shared", noted)
    small, large = (Batch.of({"x": torch.ones(4, width)}) for width in (100, 100_000))
    role.double(small)
    assert shared == []
    role.double(large)
    assert [block.size_bytes for block in shared] == [4 * 100_000 * 4]

    def full(block: Block) -> Future:
        raise WorkerError(f"no room for {block.size_bytes}")

    monkeypatch.setattr(role.group.transport, "shared", full)
    with pytest.raises(WorkerError, match=r"^echo\.double: no room for 1600000$"):
        role.double(Batch.of({"x": torch.ones(4, 100_000)}))


def test_a_rank_is_asked_where_it_stands() -> None:
    devices, layout, places = Devices(3), ParallelLayout(d=2), (2, 1)
    for place in places:
        device = devices.parts[place].device
        device.world = World(place, torch.device("cpu"), {places: None})
        device.host("echo", Placement(Echo(), layout, places, None))
    role = Echo(WorkerGroup("echo", devices, layout, places))
    assert role.first(number=9).fetch() == (0, 9)
    assert role.ping(number=5).fetch() == [5, 6]
