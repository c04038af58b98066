"""The search finds what trying everything finds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from rlhf_lightning.mapping import allocate
from rlhf_lightning.mapping.costs import Costs
from rlhf_lightning.mapping.partitions import pool_sizes, set_partitions
from rlhf_lightning.mapping.search import DeviceKind, Pool, Search
from rlhf_lightning.parallel.layout import ParallelLayout
from tests.unit.mapping.random_costs import Entry, RandomCosts
from tests.unit.mapping.simulated import ROLES, random_case

NUM_CASES = 150


def partitions(items: Sequence[str]) -> Iterator[list[list[str]]]:
    """All set partitions, by giving each item to a set or a set of its own."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i, subset in enumerate(rest):
            yield [*rest[:i], [items[0], *subset], *rest[i + 1 :]]


def every_choice(costs: Costs, roles: Sequence[str], devices: int) -> list[tuple[float, ...]]:
    """Seconds per stage of a set, for every layout of every model that fits together."""
    sizes = [
        [(layout, costs.resident(role, layout), costs.working(role, layout)) for layout in layouts]
        for role, layouts in ((role, costs.layouts(role, devices)) for role in roles)
    ]
    found = []
    for chosen in product(*sizes):
        resident = sum(size for _, size, _ in chosen)
        if resident + max(size for _, _, size in chosen) > costs.capacity:
            continue
        free = costs.capacity - resident
        seconds = [
            costs.seconds(role, layout, free) for role, (layout, *_) in zip(roles, chosen, strict=True)
        ]
        found.append(tuple(sum(column) for column in zip(*seconds, strict=True)))
    return found


def brute_force(kinds: Sequence[DeviceKind], roles: Sequence[str]) -> list[float]:
    """Seconds of the best mapping of each partition, each set on every number of devices of every kind."""
    places = [(number, size) for number, kind in enumerate(kinds) for size in kind.sizes]
    subsets = {frozenset(subset): subset for partition in partitions(roles) for subset in partition}
    tables = {
        (s, place): every_choice(kinds[place[0]].costs, subset, place[1])
        for s, subset in subsets.items()
        for place in places
    }
    best = []
    for partition in partitions(roles):
        least = math.inf
        for chosen in product(places, repeat=len(partition)):
            used = [sum(size for number, size in chosen if number == i) for i in range(len(kinds))]
            if any(n > kind.devices for n, kind in zip(used, kinds, strict=True)):
                continue
            sets = [tables[frozenset(s), place] for s, place in zip(partition, chosen, strict=True)]
            for choice in product(*sets):
                least = min(least, sum(max(column) for column in zip(*choice, strict=True)))
        best.append(least)
    return sorted(best)


@pytest.mark.parametrize("part", range(5))
def test_equals_brute_force(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if part % 2:  # the cases are small: without this, the first pass would keep everything
        monkeypatch.setattr(allocate, "_BEAM", 1)
        monkeypatch.setattr(allocate, "_PRUNE_ABOVE", 1)
    fits = 0
    for seed in range(part * NUM_CASES // 5, (part + 1) * NUM_CASES // 5):
        draw = random.Random(seed)  # noqa: S311
        roles = ROLES[: draw.randint(1, 4)]
        devices, node = draw.choice([1, 2, 4, 8, 16]), draw.choice([1, 2, 4, 8])
        sizes = pool_sizes(devices, node)
        costs = RandomCosts(seed, roles, draw.choice([1, 2, 3]), twins=draw.random() < 0.3)
        kinds = [DeviceKind(costs, devices, sizes)]
        expected = [s for s in brute_force(kinds, roles) if math.isfinite(s)]
        found = Search(kinds, roles).best(5)
        fits += bool(expected)
        if not costs.twins:
            assert [m.seconds for m in found] == pytest.approx(expected[:5], rel=1e-9), seed
        else:
            assert [m.seconds for m in found[:1]] == pytest.approx(expected[:1], rel=1e-9), seed
        for mapping in found:
            assert sorted(r for pool in mapping.pools for r in pool.roles) == sorted(roles)
            assert sum(pool.devices for pool in mapping.pools) <= devices
            assert sum(mapping.stages) == pytest.approx(sum(recomputed(costs, mapping.pools)), rel=1e-9)
    assert NUM_CASES // 10 < fits < NUM_CASES // 5 + 1


@pytest.mark.parametrize(("writers", "twins"), [(2, False), (3, True)])
def test_several_models_that_generate_equal_brute_force(writers: int, *, twins: bool) -> None:
    """Each takes of what the others leave, and generates in one of several ways for each training layout."""
    shared = 0
    for seed in range(60):
        costs = RandomCosts(seed, ROLES[:3], 6, twins=twins, capacity=20.0, writers=writers)
        kinds = [DeviceKind(costs, 4, (1, 2, 4))]
        expected = brute_force(kinds, costs.roles)[0]
        found = Search(kinds, costs.roles).best()
        assert [m.seconds for m in found] == pytest.approx([expected] if found else [], rel=1e-9), seed
        assert bool(found) == math.isfinite(expected)
        for mapping in found:
            assert sum(mapping.stages) == pytest.approx(sum(recomputed(costs, mapping.pools)), rel=1e-9)
            shared += any(len(costs.elastic & {*pool.roles}) > 1 for pool in mapping.pools)
    assert shared > 10


@pytest.mark.parametrize("part", range(4))
def test_equals_brute_force_on_random_hardware(part: int) -> None:
    fits = 0
    for seed in range(10 * part, 10 * part + 10):
        costs, devices = random_case(seed)
        sizes, roles = pool_sizes(devices, costs.hardware.gpus_per_node), costs.dataflow.roles
        kinds = [DeviceKind(costs, devices, sizes)]
        expected = brute_force(kinds, roles)[0]
        found = Search(kinds, roles).best()
        fits += bool(found)
        assert [m.seconds for m in found] == pytest.approx([expected] if found else [], rel=1e-9), seed
    assert fits


def recomputed(costs: RandomCosts, pools: Sequence[Pool]) -> list[float]:
    """Seconds of each stage from the layouts that a mapping names."""
    slowest = [0.0] * 3
    for pool in pools:
        at = pool.at.items()
        assert all(layout.num_ranks == pool.devices for _, layout in at)
        resident = sum(costs.resident(r, layout) for r, layout in at)
        assert resident + max(costs.working(r, layout) for r, layout in at) <= costs.capacity
        seconds = [costs.seconds(r, layout, costs.capacity - resident) for r, layout in at]
        slowest = [max(a, sum(c)) for a, c in zip(slowest, zip(*seconds, strict=True), strict=True)]
    return slowest


def test_a_layout_that_is_slower_alone_may_win_where_memory_is_shared() -> None:
    """Of 10 bytes the critic takes 6 and the actor 1: 1 + 18 / 3 seconds, or 3.5 + 3 / 3."""
    costs = RandomCosts(0, ("actor", "critic"), 2, twins=False)
    thirsty, modest = ParallelLayout(d=2), ParallelLayout(t=2)
    costs.table = {
        ("actor", 2): [Entry(thirsty, 1, 0, (1.0,), 18), Entry(modest, 1, 0, (3.5,), 3)],
        ("critic", 2): [Entry(thirsty, 6, 0, (0.0,), 0)],
    }
    (found,) = Search([DeviceKind(costs, 2, (2,))], costs.roles).best()
    assert (found.seconds, found.pools[0].layouts[0]) == (3.5 + 3 / 3, modest)


def test_bell_numbers() -> None:
    for items, bell in enumerate((1, 1, 2, 5, 15, 52, 203)):
        found = [frozenset(frozenset(s) for s in p) for p in set_partitions(range(items))]
        assert len(found) == len(set(found)) == bell


def test_sizes_tile_nodes() -> None:
    assert pool_sizes(32, 8) == (1, 2, 4, 8, 16, 24, 32)
    assert pool_sizes(4, 8) == (1, 2, 4)
    assert pool_sizes(12, 6) == (1, 2, 6, 12)
