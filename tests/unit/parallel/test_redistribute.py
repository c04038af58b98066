"""From any layout to any other: every number once, from the nearest owner, by hand and against slow masks."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_lightning.parallel import Generation, ParallelLayout, Sharded, even_stages
from rlhf_lightning.parallel.redistribute import DevicePlan, Placement, redistribute
from rlhf_lightning.parallel.reshard import reshard
from rlhf_lightning.parallel.weights import Shard, Weights
from tests.unit.parallel.masks import LAYERS, Mask, Masks, llama

LINES = tuple(Sharded(f"layer {i}", (8, 5), i, 0) for i in range(4))
"""80 bytes a layer."""


def placed(train: tuple[int, int, int], first: int, *, num_layers: int = 4, order: str = "tpd") -> Placement:
    layout = ParallelLayout(*train, order=order)  # type: ignore[arg-type]
    devices = tuple(range(first, first + layout.num_ranks))
    return Placement(layout, even_stages(num_layers, layout.p), devices)


def by_device(plans: tuple[DevicePlan, ...]) -> dict[int, DevicePlan]:
    return {plan.device: plan for plan in plans}


def test_the_drawing_at_the_head_of_the_module() -> None:
    source = placed((2, 1, 1), 0)
    target = Placement(ParallelLayout(1, 1, 2), even_stages(4, 1), (0, 2))
    plans = by_device(redistribute(Weights(LINES, source.stages), source, target, devices_per_node=2))
    assert [piece.name for piece in plans[0].keeps] == ["layer 0", "layer 1"]
    assert [(r.source, r.group, [s.name for s in r.slices]) for r in plans[0].receives] == [
        (1, (1, 0), ["layer 2", "layer 3"])
    ]
    assert [(r.source, r.group, r.size_bytes) for r in plans[2].receives] == [
        (0, (0, 2), 160),
        (1, (1, 2), 160),
    ]
    assert (plans[0].sent_bytes, plans[1].sent_bytes, plans[2].sent_bytes) == (160, 320, 0)
    assert (plans[0].network_bytes, plans[2].network_bytes) == (0, 320)
    assert (plans[1].keeps, plans[1].receives) == ((), ())


def test_the_owner_in_the_same_node_gives_it() -> None:
    """Both nodes have a copy, so that nothing crosses, whatever the order of the devices."""
    source = placed((1, 2, 2), 0)  # node 0: devices 0, 1, 4, 5; node 1: 2, 3, 6, 7
    source = Placement(source.layout, source.stages, (0, 1, 4, 5))
    target = Placement(ParallelLayout(1, 1, 4), even_stages(4, 1), (2, 3, 6, 7))
    plans = redistribute(Weights(LINES, source.stages), source, target, devices_per_node=4)
    assert all(plan.network_bytes == 0 for plan in plans)
    assert [plan.sent_bytes for plan in plans if plan.device in source.devices] == [320, 320, 320, 320]


def test_owners_that_are_equally_near_share_the_work() -> None:
    """Four copies of four layers: a layer from each, and what each sends comes to the same."""
    source, target = placed((1, 1, 4), 0), placed((1, 1, 1), 4)
    plans = by_device(redistribute(Weights(LINES, source.stages), source, target, devices_per_node=8))
    assert [plans[device].sent_bytes for device in range(4)] == [80, 80, 80, 80]
    assert {receive.source for receive in plans[4].receives} == {0, 1, 2, 3}


def test_the_work_that_they_share_is_counted_in_bytes() -> None:
    lines = tuple(Sharded(f"layer {i}", (rows, 5), i, 0) for i, rows in enumerate((8, 4, 4)))
    source, target = placed((1, 1, 2), 0, num_layers=3), placed((1, 1, 1), 2, num_layers=3)
    plans = redistribute(Weights(lines, source.stages), source, target, devices_per_node=8)
    assert [plan.sent_bytes for plan in plans] == [80, 80, 0]


def test_devices_and_senders_come_in_order() -> None:
    source = Placement(ParallelLayout(2, 1, 1), even_stages(4, 2), (9, 8))
    target = placed((1, 1, 1), 1)
    plans = redistribute(Weights(LINES, source.stages), source, target, devices_per_node=1)
    assert [plan.device for plan in plans] == [1, 8, 9]
    assert [receive.source for receive in plans[0].receives] == [8, 9]
    assert plans[0].network_bytes == plans[0].received_bytes > 0


def test_a_coarser_shard_is_put_together_from_finer_ones() -> None:
    source, target = placed((1, 4, 1), 0), placed((1, 2, 1), 4)
    (first, second) = redistribute(Weights(LINES[:1], ((0,),)), source, target, devices_per_node=8)[4:]
    pieces = [(r.source, s.start, s.stop) for r in first.receives for s in r.slices]
    assert pieces == [(0, 0, 2), (1, 2, 4)]
    assert [(r.source, s.start, s.stop) for r in second.receives for s in r.slices] == [(2, 4, 6), (3, 6, 8)]


class Generating(Placement):
    """Whose devices hold their generation shards, in place of those that they train."""

    def shards(self, weights: Weights) -> dict[int, Shard]:
        generating = self.layout.generating
        return {device: weights.generation(generating, rank) for rank, device in enumerate(self.devices)}


def test_hybridflows_plan_is_the_special_case() -> None:
    """On the same devices, from training to generation shards: the same bytes stay, and the same come."""
    masks = Masks(llama(tied=True))
    layout = ParallelLayout(4, 2, 2, generation=Generation(2, 1))
    weights = Weights(tuple(masks.params), even_stages(LAYERS, 4))
    devices = tuple(range(16))
    source = Placement(layout, weights.stages, devices)
    target = Generating(layout, weights.stages, devices)
    plans = redistribute(weights, source, target, devices_per_node=16)
    for plan, part in zip(plans, reshard(weights, layout).ranks, strict=True):
        assert plan.keeps == part.keeps
        assert plan.received_bytes == part.received_bytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (placed((2, 2, 2), 0, num_layers=LAYERS), placed((1, 4, 2), 8, num_layers=LAYERS)),
        (placed((4, 2, 1), 0, num_layers=LAYERS), placed((2, 4, 2), 4, num_layers=LAYERS)),
        (placed((1, 8, 2), 0, num_layers=LAYERS), placed((4, 1, 2), 12, num_layers=LAYERS, order="tdp")),
        (placed((3, 1, 1), 0, num_layers=LAYERS), placed((2, 2, 1), 1, num_layers=LAYERS)),
    ],
    ids=["apart", "overlapping", "finer", "uneven"],
)
def test_every_number_comes_once_from_the_nearest(source: Placement, target: Placement, tied: bool) -> None:
    masks, node = Masks(llama(tied=tied)), 4
    weights = Weights(tuple(masks.params), source.stages)
    held, wanted = shards(masks, source), shards(masks, target)
    plans = redistribute(weights, source, target, devices_per_node=node)
    assert [plan.device for plan in plans] == sorted({*held, *wanted})
    nothing = np.zeros(masks.length, bool)
    sent = dict.fromkeys([plan.device for plan in plans], 0)
    for plan in plans:
        mine, need = held.get(plan.device, nothing), wanted.get(plan.device, nothing)
        near = np.logical_or.reduce(
            [nothing, *(m for d, m in held.items() if d // node == plan.device // node)]
        )
        counts, network = masks.counts(plan.keeps), 0
        assert (counts == (mine & need)).all()
        for receive in plan.receives:
            more = masks.counts(receive.slices)
            assert not more[~held[receive.source]].any()
            if receive.source // node != plan.device // node:
                assert not more[near].any()
                network += 2 * more.sum()
            sent[receive.source] += 2 * int(more.sum())
            counts = counts + more
        assert (counts == need).all()
        assert plan.received_bytes == 2 * (need & ~mine).sum()
        assert plan.network_bytes == network == 2 * (need & ~mine & ~near).sum()
    assert {plan.device: plan.sent_bytes for plan in plans} == sent


def shards(masks: Masks, placement: Placement) -> dict[int, Mask]:
    places = [placement.layout.coordinate(rank) for rank in range(placement.layout.num_ranks)]
    return {
        device: masks.shard(placement.stages, at.p, t=placement.layout.t, index=at.t)
        for device, at in zip(placement.devices, places, strict=True)
    }


def test_placements_that_cannot_be_are_refused() -> None:
    layout = ParallelLayout(1, 2, 1)
    with pytest.raises(ValueError, match=r"devices=\(0, 0\).*p t d = 2 ranks. Give 2 devices, each once"):
        Placement(layout, ((0,),), (0, 0))
    with pytest.raises(ValueError, match=r"2 stages of layers for p=1"):
        Placement(layout, ((0,), (1,)), (0, 1))
    good = Placement(layout, even_stages(4, 1), (0, 1))
    with pytest.raises(ValueError, match=r"devices_per_node=0"):
        redistribute(Weights(LINES, good.stages), good, good, devices_per_node=0)
    with pytest.raises(ValueError, match=r"layer 3 is on 0 of the stages"):
        redistribute(
            Weights(LINES, good.stages), good, Placement(layout, ((0, 1, 2),), (0, 1)), devices_per_node=8
        )
