"""A ratio of two systems over several rounds, and the machine it was measured on."""

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


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
    """Cores and load: a ratio from a busy machine says less than one from an idle one."""
    return {"cores": os.cpu_count(), "load_1min": os.getloadavg()[0], "platform": platform.platform()}
