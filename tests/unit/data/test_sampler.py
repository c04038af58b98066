"""The order of the rows, and going on in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from torch import Generator

from rlhf_lightning.data.sampler import DrawnRows, EpochSampler, permutation


def sampler(size: int = 10, *, seed: int = 7, shuffle: bool = True) -> EpochSampler:
    return EpochSampler(size=size, shuffle=shuffle, seed=seed)


def test_every_row_once_an_epoch_in_another_order() -> None:
    one = sampler(100)
    first, second = list(one), list(one)
    assert sorted(first) == list(range(100))
    assert sorted(second) == [1 << 32 | index for index in range(100)]
    assert first != sorted(first)
    assert [key - (1 << 32) for key in second] != first


def test_seed_decides_the_order() -> None:
    assert list(sampler(seed=1)) == list(sampler(seed=1))
    assert list(sampler(100, seed=1)) != list(sampler(100, seed=2))


def test_seeds_that_look_alike_draw_other_orders() -> None:
    """Sums and digits in a row would be the same; the generator would leave out the upper half of one."""
    seeds = [(1, 11), (11, 1), (111,), (12,), (6, 6), (1 << 32 | 12,)]
    assert len({tuple(permutation(100, *each).tolist()) for each in seeds}) == len(seeds)


def test_without_shuffling_the_order_is_the_files() -> None:
    assert list(sampler(4, shuffle=False)) == [0, 1, 2, 3]


@pytest.mark.parametrize("position", range(11))
def test_state_goes_on_where_it_was_taken(position: int) -> None:
    whole = sampler()
    expected = [list(whole), list(whole)]
    stopped = sampler()
    keys = iter(stopped)
    taken = list(islice(keys, position))
    resumed = sampler()
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.state_dict() == stopped.state_dict()
    assert [taken + list(resumed), list(resumed)] == expected


def test_set_epoch_starts_an_epoch_but_not_the_running_one() -> None:
    one = sampler()
    list(islice(one, 3))
    resumed = sampler()
    resumed.load_state_dict(one.state_dict())
    resumed.set_epoch(0)
    assert len(list(resumed)) == 7, "this one is under way"
    one.set_epoch(5)
    assert {key >> 32 for key in one} == {5}
    assert one.epoch == 6


def test_after_a_resume_its_own_count_holds() -> None:
    one = sampler()
    one.set_epoch(0)
    list(one)
    resumed = sampler()
    resumed.load_state_dict(one.state_dict())
    resumed.set_epoch(1)
    resumed.set_epoch(2)
    assert {key >> 32 for key in islice(resumed, 4)} == {1}, "no row was read between the two calls"
    again = sampler()
    again.load_state_dict(resumed.state_dict())
    again.set_epoch(2)
    assert len(list(again)) == 6, "the number is one too high, and this epoch under way"
    resumed.set_epoch(3)
    assert {key >> 32 for key in resumed} == {2}, "the epoch before was cut short"


def test_an_epoch_announced_before_the_state_came_counts() -> None:
    one = sampler()
    list(islice(one, 3))
    late = sampler()
    late.set_epoch(0)
    late.load_state_dict(one.state_dict())
    assert len(list(late)) == 7, "this one is under way"
    used = sampler()
    used.set_epoch(1)
    list(islice(used, 2))
    used.load_state_dict(one.state_dict())
    assert len(list(used)) == 7, "that announcement is over"
    cut = sampler()
    cut.set_epoch(1)
    cut.load_state_dict(one.state_dict())
    assert [key >> 32 for key in cut] == [1] * 10, "the epoch before was cut short"


def test_a_second_look_begins_at_the_beginning() -> None:
    one = sampler()
    first = next(iter(one))
    assert next(iter(one)) == first


def test_state_of_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match="in the middle of 10 rows, the data has 11"):
        sampler(11).load_state_dict(sampler(10).state_dict())


@pytest.mark.parametrize(
    ("held", "warned"), [({"fingerprint": 1}, True), ({"fingerprint": 2}, False), ({}, False)], ids=str
)
@pytest.mark.parametrize("drawn", [False, True])
def test_other_rows_of_the_same_number_are_told_of(
    held: dict[str, int], *, warned: bool, drawn: bool, caplog: pytest.LogCaptureFixture
) -> None:
    known = {"size": 3, "seed": 7, "fingerprint": 2}
    now = DrawnRows(draw=lambda *_: 0, **known) if drawn else EpochSampler(shuffle=True, **known)
    state = {name: value for name, value in now.state_dict().items() if name != "fingerprint"}
    now.load_state_dict(state | held)
    assert [said[:23] for said in caplog.messages] == ["the data has other rows"] * warned


def test_another_seed_or_order_at_a_resume_repeats_and_skips_no_row() -> None:
    stopped = sampler(seed=7)
    rows = iter(stopped)
    first = [next(rows) for _ in range(5)]
    state = stopped.state_dict()
    resumed = sampler(seed=8)
    resumed.load_state_dict(state)
    assert sorted(first + list(resumed)) == list(range(10))
    assert list(resumed) == list(sampler_at(1, seed=7)), "later epochs, too"
    with pytest.raises(ValueError, match=r"Resume with --data\.shuffle true"):
        sampler(shuffle=False).load_state_dict(state)
    before = {key: value for key, value in state.items() if key not in ("seed", "shuffle")}
    resumed = sampler(seed=7)
    resumed.load_state_dict(before)
    assert sorted(first + list(resumed)) == list(range(10)), "a checkpoint that says less"


def test_a_seed_that_draws_no_order_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    sampler(seed=8, shuffle=False).load_state_dict(sampler(seed=7, shuffle=False).state_dict())
    assert not caplog.messages
    sampler(seed=8).load_state_dict(sampler(seed=7).state_dict())
    assert caplog.messages == ["rows go on in the order of the checkpoint's seed, 7"]


def sampler_at(epoch: int, *, seed: int) -> EpochSampler:
    """A sampler at the beginning of an epoch."""
    found = sampler(seed=seed)
    found.set_epoch(epoch)
    return found


def drawn(draw: Callable[[int, Generator], int], *, size: int = 10) -> DrawnRows:
    return DrawnRows(draw=draw, size=size, seed=7)


def by_chance(number: int, generator: Generator) -> int:
    return int(torch.randint(10, (), generator=generator))


def test_rows_are_drawn_one_by_one_and_each_draw_has_an_id_of_its_own() -> None:
    asked: list[int] = []

    def draw(number: int, generator: Generator) -> int:
        asked.append(number)
        return 3

    one = drawn(draw)
    keys = iter(one)
    assert next(keys) == 3
    assert asked == [0], "no row is drawn before its time"
    assert [next(keys), *keys, *one] == [number << 32 | 3 for number in range(1, 20)]


@pytest.mark.parametrize("position", range(11))
def test_draws_go_on_where_the_state_was_taken(position: int) -> None:
    whole = drawn(by_chance)
    expected = [list(whole), list(whole)]
    assert len({key & 0xFFFFFFFF for key in expected[0]}) < 10, "by chance some come twice"
    stopped = drawn(by_chance)
    taken = list(islice(stopped, position))
    resumed = drawn(by_chance)
    resumed.load_state_dict(stopped.state_dict())
    assert [taken + list(resumed), list(resumed)] == expected


@pytest.mark.parametrize("index", [-1, 10])
def test_a_draw_of_no_row_is_refused(index: int) -> None:
    one = drawn(lambda number, generator: index)
    with pytest.raises(ValueError, match=rf"^draw\(0, \.\.\.\) of the data gives {index}, .* give 0 to 9, "):
        list(one)


@pytest.mark.parametrize(("drawn", "told"), [(True, "without a `draw`"), (False, "with a `draw`")])
def test_rows_that_were_chosen_otherwise_are_not_gone_on_with(*, drawn: bool, told: str) -> None:
    kinds = [EpochSampler(size=3, shuffle=True, seed=7), DrawnRows(draw=lambda *_: 0, size=3, seed=7)]
    mine, other = kinds[drawn], kinds[not drawn]
    with pytest.raises(ValueError, match=f"{told} of its own, .*Resume with the same data"):
        mine.load_state_dict(other.state_dict())
    mine.load_state_dict({name: value for name, value in other.state_dict().items() if name != "drawn"})
