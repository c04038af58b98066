"""What crosses from the controller to a device and back: plain data, pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rlhf_lightning.controller.block import Rows
from rlhf_lightning.parallel import Scope


class ColumnInput(NamedTuple):
    """How a device assembles one column of a call from the blocks that come with the call."""

    name: str
    picks: tuple[Rows, ...]
    """For each of its blocks of values, the rows to take of the block; they are joined."""
    by: tuple[Rows, ...] = ()
    """The same for its blocks of row numbers, which follow: which of the joined rows to take; empty: all."""


class Call(NamedTuple):
    """One call of one role's method on one device.

    Example:
        >>> Call("actor", "update_actor", 0, 8, (ColumnInput("values", (slice(0, 8),)),), {"loss": loss}, ())
    """

    role: str
    method: str
    rank: int
    """Rank within the role's layout."""
    num_rows: int
    columns: tuple[ColumnInput, ...]
    """In the order of their blocks."""
    arguments: Mapping[str, object]
    """The method's keyword arguments."""
    returns: tuple[str, ...]
    """Columns of the result, each a future of its own; empty for a method that returns a plain value."""
    scope: Scope = "all"
    """Which of the ranks and rows of what the step asked for it is of."""

    @property
    def bare(self) -> bool:
        """Whether it has neither rows nor arguments nor columns to return: role, method and rank say all."""
        more = self.num_rows or self.columns or self.arguments or self.returns
        return not more and self.scope == "all"


@dataclass(frozen=True)
class CallReport:
    """A device's report of a finished call, with the return value of a method that returns no columns."""

    role: str
    method: str
    rank: int
    """Global rank of the device."""
    started_s: float
    """Unix time at which it began."""
    seconds: float
    """Wall time inside the device."""
    memory_bytes: int
    """Peak memory of the process (resident), or of the accelerator (allocated), up to the call's end."""
    value: object
    """The method's plain value, or None."""
    num_rows: int = 0
    """Rows of the call on this device."""
    left: bool = False
    """Whether the role then held a gradient that no optimizer step had taken."""
