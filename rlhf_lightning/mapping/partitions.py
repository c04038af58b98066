"""Combinatorics of a placement: which models can share devices, and how many devices a set can have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TypeVar

T = TypeVar("T")


def set_partitions(items: Sequence[T]) -> Iterator[tuple[tuple[T, ...], ...]]:
    """All partitions of items into sets: Bell's numbers, 1, 2, 5, 15, 52, 203 for one to six items."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for size in range(len(items)):
        for others in combinations(range(len(rest)), size):
            with_first = (first, *(rest[i] for i in others))
            left = [rest[i] for i in range(len(rest)) if i not in others]
            for tail in set_partitions(left):
                yield (with_first, *tail)


def pool_sizes(devices: int, gpus_per_node: int) -> tuple[int, ...]:
    """Numbers of devices that a set of models can have: 1, 2, 4, ... that divide a node, then whole nodes.

    Sets of these sizes can always be packed so that none smaller than a node lies in two.
    """
    inside = [1]
    while gpus_per_node % (2 * inside[-1]) == 0:
        inside.append(2 * inside[-1])
    sizes = {*inside, *range(gpus_per_node, devices + 1, gpus_per_node)}
    return tuple(sorted(size for size in sizes if size <= devices))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, in order."""
    return tuple(i for i in range(1, number + 1) if number % i == 0)
