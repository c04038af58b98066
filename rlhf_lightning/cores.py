"""How many cores this process may use: in a container or a batch job, often fewer than the machine has."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
"""Where Linux tells a container what it may use: in one file since cgroup v2, in two before."""


def usable_cores() -> int:
    """Cores that this process may use, at least 1: those of its affinity and of its container's CPU quota.

    A quota (`docker run --cpus 2`, `limits.cpu` of Kubernetes) hides no core, but stops every thread once
    their time together is used up: as many threads as cores would spend most of it waiting for each other.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, math.ceil(_quota(cores))))


def _quota(unlimited: float) -> float:
    """Seconds of computation that a second may have; a part of a core counts."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # no such file; "max 100000", which is no number
            quota, period = (float(word) for name in names for word in (_CGROUPS / name).read_text().split())
            return quota / period if quota > 0 else unlimited
    return unlimited
