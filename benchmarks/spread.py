"""A ratio of two systems over several rounds, and the day and the machine it was measured on."""

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and range of one number over the rounds."""

    median: float
    """Median of the rounds."""

    low: float
    """The smallest."""

    high: float
    """The largest."""

    def __str__(self) -> str:
        """The median with the range in brackets."""
        return f"{self.median:.2f} [{self.low:.2f} .. {self.high:.2f}]"

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one number."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def machine() -> dict[str, object]:
    """Day, processor, cores and load: a ratio from a busy machine says less than one from an idle one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "platform": platform.platform(),
    }
