"""Which models lie on a device while another one computes there: as many as there is room for.

    call of a role ── what is away of it, and what its call took above that: is there room?
        no  ──> send away those that compute last of all, until there is
        yes ──> bring it, and measure what the call takes
A device decides for itself: sending away and bringing are no collectives.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from rlhf_lightning.controller.call import Call
from rlhf_lightning.controller.register import Remote

_RESERVE = 10
"""One part in so many of a GPU's memory stays free: for communication, and for what torch cannot join."""
_REMEMBERED = 8
"""Calls of a method of which the largest says what the next will take."""


class Gauge(Protocol):
    """The memory of a device."""

    def free_bytes(self) -> int:
        """That models and calls may still take."""

    def begin(self) -> None:
        """Start to watch."""

    def taken_bytes(self) -> int:
        """The most that was taken at once since, beyond what was then."""


class GPUGauge:
    """The memory of the present GPU, as CUDA and torch's allocator tell it."""

    def __init__(self) -> None:
        self._before, self._highest = 0, 0

    def free_bytes(self) -> int:
        """See `Gauge.free_bytes`."""
        free, total = torch.cuda.mem_get_info()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + unused - total // _RESERVE

    def begin(self) -> None:
        """See `Gauge.begin`."""
        self._highest = self.highest_bytes()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def taken_bytes(self) -> int:
        """See `Gauge.taken_bytes`."""
        return torch.cuda.max_memory_allocated() - self._before

    def highest_bytes(self) -> int:
        """The most of all so far."""
        return max(self._highest, torch.cuda.max_memory_allocated())


class Residents:
    """The roles of a device that make room for each other.

    Args:
        roles: of the device by name; more may come.
        gauge: of its memory; without one, as on a CPU, one model at a time is there.
    """

    def __init__(self, roles: Mapping[str, Remote], gauge: Gauge | None) -> None:
        self._roles, self._gauge = roles, gauge
        self._here: list[str] = []
        self._past: deque[tuple[str, str]] = deque(maxlen=256)
        self._taken: dict[tuple[str, str], deque[int]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    @contextmanager
    def computing(self, call: Call) -> Iterator[None]:
        """Have the role of a call on the device."""
        key = call.role, call.method
        for name in self._by_next_use(key):
            if self._has_room(key):
                break
            self._roles[name].offload()
            self._here.remove(name)
        # One that is here may have lost what it shares with one that went.
        self._roles[call.role].reload()
        if call.role not in self._here:
            self._here.append(call.role)
        self._past.append(key)
        if self._gauge is None:
            yield
            return
        self._gauge.begin()
        yield
        self._taken[key].append(self._gauge.taken_bytes())

    def _has_room(self, key: tuple[str, str]) -> bool:
        """Whether a call can run beside all that is here; nobody knows of one that never ran."""
        role, taken = self._roles[key[0]], self._taken.get(key)
        if self._gauge is None or not taken or role.takes_all(key[1]):
            return False
        return role.away_bytes() + max(taken) <= self._gauge.free_bytes()

    def _by_next_use(self, key: tuple[str, str]) -> list[str]:
        """The others that are here, first the one wanted last of all after the last time of this call."""
        past = [*self._past]
        since = past[len(past) - past[::-1].index(key) :] if key in past else []
        wanted = [role for role, _ in since]
        called = self._roles[key[0]]
        others = [name for name in self._here if name != key[0] and not self._roles[name].lies_in(called)]
        return sorted(others, key=lambda n: wanted.index(n) if n in wanted else len(wanted), reverse=True)
