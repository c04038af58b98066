"""How a number of things is divided: evenly, or by what fits together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise


def edges(count: int, parts: int) -> list[int]:
    """Where each part begins, and where the last ends; sizes differ by at most one, and may be 0."""
    return [count * i // parts for i in range(parts + 1)]


def shares(count: int, parts: int) -> list[int]:
    """The sizes of the parts."""
    return [stop - start for start, stop in pairwise(edges(count, parts))]


def fitting_together(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Runs of neighbours whose sizes add up to at most `most`; a larger thing is a run of its own."""
    first = total = 0
    for place, size in enumerate(sizes):
        if place > first and total + size > most:
            yield slice(first, place)
            first, total = place, 0
        total += size
    if sizes:
        yield slice(first, len(sizes))


def evened(costs: Sequence[float]) -> list[int]:
    """An order of things whose halves, quarters and so on, as `shares` cuts them, cost about the same.

    The dearest first, each goes to the half that costs less so far and has room; then each half likewise. So
    the order suits any power of two of parts; other numbers of parts get what chance gives them.

    Args:
        costs: of each thing; where all are equal, the things stay as they are.
    """
    if len(costs) < 2 or min(costs) == max(costs):
        return list(range(len(costs)))
    rooms = shares(len(costs), 2)
    halves: tuple[list[int], list[int]] = ([], [])
    spent = [0.0, 0.0]
    for thing in sorted(range(len(costs)), key=lambda thing: -costs[thing]):
        open_ = [half for half in (0, 1) if len(halves[half]) < rooms[half]]
        half = min(open_, key=lambda half: spent[half])
        halves[half].append(thing)
        spent[half] += costs[thing]
    return [half[place] for half in halves for place in evened([costs[thing] for thing in half])]
