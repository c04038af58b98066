"""What `dispatch.py` measures, the same for every system: how much is echoed, how often, how fast.

A turn is some pings and one chain of echoes of each kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One measurement: chains of echoes (the output of one call is the input of the next) and pings.

    Example: `Exchange(rows=1024, width=1024, columns=4).size_bytes == 33_554_432`.
    """

    workers: int = 4
    """Worker processes of the group."""

    rows: int = 1024
    """Rows of the echoed batch, split over the workers."""

    width: int = 1024
    """int64 values a row and column."""

    columns: int = 4
    """Columns of the batch."""

    calls: int = 10
    """Chained echoes that are timed together, after one that is not timed."""

    warmup: int = 12
    """Chains of each kind that do not count: what touches pages of the store for the first time is slow."""

    chains: int = 4
    """Chains of each kind after those."""

    pings: int = 50
    """ONE_TO_ALL calls of each turn, each timed alone."""

    @property
    def turns(self) -> int:
        """How often a system measures everything."""
        return self.warmup + self.chains

    @property
    def size_bytes(self) -> int:
        """Bytes of the echoed batch."""
        return self.rows * self.width * self.columns * 8


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one system took."""

    echo_s: Mapping[str, Sequence[float]]
    """Seconds of one echo, one number a chain, by the way in which the calls were chained."""

    ping_s: Sequence[float]
    """Seconds of a ONE_TO_ALL call, the median of each turn."""
