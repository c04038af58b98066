"""Roles on one device of a known size: who is there, who goes, and what is moved in vain."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from rlhf_lightning.controller import Caller, Remote, Worker
from rlhf_lightning.controller.call import Call
from rlhf_lightning.controller.device import Device
from rlhf_lightning.controller.residents import GPUGauge, Residents
from rlhf_lightning.parallel import ParallelLayout
from tests.unit.controller.devices import host

PPO = (
    ("actor", "generate", 30),
    ("critic", "values", 10),
    ("reference", "score", 10),
    ("reward", "score", 10),
    ("critic", "update", 20),
    ("actor", "update", 20),
)
SIZES = {"actor": 40, "critic": 40, "reference": 10, "reward": 10}


class Sized(Remote):
    """A role of so many bytes, which counts how often they move."""

    def __init__(self, size: int, *, greedy: bool = False) -> None:
        self.size, self.greedy, self.away, self.moves = size, greedy, True, 0

    def caller(self) -> Caller | None:
        return None

    def build(self, worker: Worker) -> None:
        pass

    def offload(self) -> None:
        assert not self.away
        self.moves += 1
        self.away = True

    def reload(self) -> None:
        self.moves += self.away
        self.away = False

    def reload_bytes(self) -> int:
        return self.size if self.away else 0

    def takes_all(self, method: str) -> bool:
        return self.greedy and method == "generate"


@dataclass
class Memory(GPUGauge):
    """A device of so many bytes; `taking` is what the present call takes."""

    size: int
    roles: dict[str, Sized]
    taking: int = 0
    least: int = 0

    def held(self) -> int:
        return sum(role.size for role in self.roles.values() if not role.away)

    def free_bytes(self) -> int:
        return self.size - self.held()

    def begin(self) -> None:
        self.taking = 0

    def taken_bytes(self) -> int:
        return self.taking

    def compute(self, taking: int) -> None:
        self.taking = taking
        self.least = max(self.least, self.held() + taking)


class Bench:
    """A device that runs calls of a kind."""

    def __init__(self, size: int, *, gauge: bool = True, greedy: bool = False) -> None:
        self.roles = {name: Sized(held, greedy=greedy) for name, held in SIZES.items()}
        self.memory = Memory(size, self.roles)
        self.residents = Residents(self.roles, self.memory if gauge else None)

    def run(self, calls: Sequence[tuple[str, str, int]]) -> None:
        for role, method, taking in calls:
            with self.residents.computing(Call(role, method, 0, 0, (), {}, ())):
                assert not self.roles[role].away
                self.memory.compute(taking)

    def here(self) -> set[str]:
        return {name for name, role in self.roles.items() if not role.away}

    def moves(self) -> int:
        """Bytes since the last time."""
        found = sum(role.moves * role.size for role in self.roles.values())
        for role in self.roles.values():
            role.moves = 0
        return found


@pytest.mark.parametrize("offload", [True, False])
def test_a_model_that_was_built_makes_room_for_the_next(*, offload: bool) -> None:
    device, role = Device(0), Sized(40)
    device.offload = offload
    role.reload()
    host(device, role, ParallelLayout())
    assert role.away == offload


def test_what_followed_the_latest_such_call_says_who_is_needed_last() -> None:
    bench, calls = Bench(130), {role: (role, "score", 1) for role in SIZES}
    for order in (("actor", "critic", "reference"), ("actor", "reference", "critic")):
        bench.run([calls[role] for role in order] * 2)
    assert bench.residents._by_next_use(("actor", "score")) == ["critic", "reference"]


def test_where_all_have_room_nothing_moves_once_every_call_was_seen() -> None:
    bench = Bench(130)
    bench.run(PPO * 2)
    assert bench.here() == set(SIZES)
    bench.moves()
    bench.run(PPO * 3)
    assert bench.moves() == 0


def test_a_call_that_was_never_seen_has_the_device_for_itself() -> None:
    bench = Bench(1000)
    for number, (role, _, _) in enumerate(PPO):
        bench.run(PPO[number : number + 1])
        assert bench.here() == {role}
    bench.run(PPO)
    assert bench.here() == set(SIZES)
    bench.run([("actor", "save", 0)])
    assert bench.here() == {"actor"}


def moved(bench: Bench, *, iterations: int = 6) -> float:
    """Bytes an iteration there and back, once every call was seen."""
    bench.run(PPO * 3)
    bench.moves()
    bench.run(PPO * iterations)
    return bench.moves() / iterations


def fewest(size: int, *, iterations: int = 6) -> float:
    """The same of whoever knows all that is to come, by trying everything."""

    def total(rounds: int) -> int:
        costs = {frozenset[str](): 0}
        for role, _, taking in PPO * rounds:
            after: dict[frozenset[str], int] = {}
            for here, cost in costs.items():
                for stay in subsets(here - {role}):
                    there = stay | {role}
                    if sum(SIZES[name] for name in there) + taking <= size:
                        moving = cost + sum(SIZES[name] for name in here ^ there)
                        after[there] = min(moving, after.get(there, moving))
            costs = after
        return min(costs.values())

    return (total(iterations + 3) - total(3)) / iterations


def subsets(names: frozenset[str]) -> list[frozenset[str]]:
    return [frozenset(some) for n in range(len(names) + 1) for some in itertools.combinations(names, n)]


ALONE = 280
"""Bytes an iteration with one model at a time."""


@pytest.mark.parametrize("size", range(70, 131, 5))
def test_no_more_is_there_than_fits_and_little_more_moves_than_must(size: int) -> None:
    bench = Bench(size)
    assert fewest(size) <= moved(bench) <= 1.25 * fewest(size) < ALONE
    assert bench.memory.least <= size


@pytest.mark.parametrize(("size", "expected"), [(70, 200), (100, 120), (110, 40), (120, 20), (130, 0)])
def test_those_go_that_are_wanted_last_of_all(size: int, expected: int) -> None:
    assert moved(Bench(size)) == fewest(size) == expected


def test_without_a_gauge_one_is_there_at_a_time() -> None:
    bench = Bench(1000, gauge=False)
    for number, (role, _, _) in enumerate(PPO * 2):
        bench.run((PPO * 2)[number : number + 1])
        assert bench.here() == {role}
    assert moved(bench) == ALONE


def test_what_a_call_took_lately_counts_and_what_it_took_long_ago_does_not() -> None:
    bench = Bench(100)
    bench.run([("reward", "score", 10), ("reference", "score", 10)] * 2)
    assert bench.here() == {"reward", "reference"}
    bench.run([("reference", "score", 85)])
    bench.run([("reference", "score", 10)])
    assert bench.here() == {"reference"}  # 85 beside both may come again
    for _ in range(8):
        bench.run([("reward", "score", 10), ("reference", "score", 10)])
    assert bench.here() == {"reference", "reward"}


def test_a_call_that_takes_all_memory_finds_all_of_it() -> None:
    bench = Bench(1000, greedy=True)
    bench.run(PPO * 3)
    assert bench.here() == set(SIZES)
    bench.run(PPO[:1])
    assert bench.here() == {"actor"}
    bench.run(PPO[1:2])
    assert bench.here() == {"actor", "critic"}


def test_what_went_with_another_comes_back() -> None:
    """A reference below an actor's adapters has no memory of its own."""
    bench = Bench(130)
    bench.run(PPO * 2)
    bench.roles["reference"].offload()
    bench.run([("reference", "score", 10)])


def test_a_call_that_failed_says_nothing_of_the_next() -> None:
    bench = Bench(1000)
    bench.run(PPO * 2)
    call = Call("reward", "other", 0, 0, (), {}, ())
    with pytest.raises(ValueError, match="no"), bench.residents.computing(call):
        raise ValueError("no")
    bench.run([("actor", "update", 20), ("reward", "other", 0)])
    assert bench.here() == {"reward"}


def test_a_gpus_memory_as_cuda_and_torch_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"memory_reserved": 250, "memory_allocated": 200, "max_memory_allocated": 700}
    for name in told:
        monkeypatch.setattr(torch.cuda, name, partial(told.__getitem__, name))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (300, 1000))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: told.update(max_memory_allocated=200))
    gauge = GPUGauge()
    assert gauge.free_bytes() == 300 + (250 - 200) - 1000 / 10
    gauge.begin()
    assert gauge.taken_bytes() == 0
    told["max_memory_allocated"] = 500
    assert (gauge.taken_bytes(), gauge.highest_bytes()) == (300, 700)
