"""Offloading: which models stay on a device while another one computes there. As many as there is room for.

    call of a role ── is there room for its offloaded parts, and for what such a call took before?
        no  ──> offload the models that will be used last, until there is room
        yes ──> reload the role, run the call, and measure the memory that it takes
Each device decides for itself: offloading and reloading are not collective.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from rlhf_lightning.controller.call import Call
from rlhf_lightning.controller.register import Remote

_RESERVE = 10
"""1/10 of a GPU's memory stays free: for communication, and for fragments that torch cannot join."""
_REMEMBERED = 8
"""The next call of a method is expected to take as much memory as the largest of so many before it."""


class GPUGauge:
    """The memory of the current GPU, according to CUDA and torch's allocator."""

    def __init__(self) -> None:
        self._before, self._highest = 0, 0

    def free_bytes(self) -> int:
        """Memory that models and calls may still take."""
        free, total = torch.cuda.mem_get_info()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + unused - total // _RESERVE

    def begin(self) -> None:
        """Start to measure."""
        self._highest = self.highest_bytes()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def taken_bytes(self) -> int:
        """The highest use of memory since `begin`, less the use at that time."""
        return torch.cuda.max_memory_allocated() - self._before

    def highest_bytes(self) -> int:
        """The highest use of memory so far, with what sleeps of vLLM's; `begin` does not reset it."""
        return max(self._highest, torch.cuda.max_memory_allocated())


class Residents:
    """The roles of a device that make room for each other.

    Args:
        roles: the device's roles by name; more may be added.
        gauge: the device's memory; without one, as on a CPU, only one model is there at a time.
    """

    def __init__(self, roles: Mapping[str, Remote], gauge: GPUGauge | None) -> None:
        self._roles, self._gauge = roles, gauge
        self._here: list[str] = []
        self._past: deque[tuple[str, str]] = deque(maxlen=256)
        self._taken: dict[tuple[str, str], deque[int]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    @contextmanager
    def computing(self, call: Call) -> Iterator[None]:
        """Run a call within this context: its role is on the device, others are offloaded where needed."""
        key = call.role, call.method
        for name in self._by_next_use(key):
            if self._has_room(key):
                break
            self._roles[name].offload()
            self._here.remove(name)
        # Also where the role is here: it may share memory with a role that was just offloaded.
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
        """Whether a call can run beside the models that are here; False for one that was never measured."""
        role, taken = self._roles[key[0]], self._taken.get(key)
        if self._gauge is None or not taken or role.takes_all(key[1]):
            return False
        return role.reload_bytes() + max(taken) <= self._gauge.free_bytes()

    def _by_next_use(self, key: tuple[str, str]) -> list[str]:
        """The other roles here, those needed last first, judged by what followed the previous such call."""
        past = [*self._past]
        since = past[len(past) - past[::-1].index(key) :] if key in past else []
        wanted = [role for role, _ in since]
        called = self._roles[key[0]]
        others = [name for name in self._here if name != key[0] and not self._roles[name].lies_in(called)]
        return sorted(others, key=lambda n: wanted.index(n) if n in wanted else len(wanted), reverse=True)
