"""What crosses from the controller to a device and back: plain data, pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rlhf_lightning.controller.block import Rows


class ColumnInput(NamedTuple):
    """One column of a call's rows: for each block that comes with the call, the rows to take of it."""

    name: str
    picks: tuple[Rows, ...]
    by: tuple[Rows, ...] = ()
    """The same for blocks that follow them: numbers of the rows that are meant; empty for all of them."""


@dataclass(frozen=True)
class Call:
    """One call of one role's method on one device.

    Example:
        >>> Call("actor", "update_actor", 0, 8, (ColumnInput("values", (slice(0, 8),)),), {"loss": loss}, ())
    """

    role: str
    method: str
    rank: int
    """Within the role's layout."""
    num_rows: int
    columns: tuple[ColumnInput, ...]
    """In the order in which their blocks are handed over."""
    arguments: Mapping[str, object]
    """The method's keyword arguments."""
    returns: tuple[str, ...]
    """Columns of the result, each a future of its own; empty for a method that returns a plain value."""

    @property
    def bare(self) -> bool:
        """Whether the names of role and method say it all."""
        return not (self.num_rows or self.columns or self.arguments or self.returns)


@dataclass(frozen=True)
class CallReport:
    """What a device says of a finished call, with the value of a method that returns no columns."""

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
    """Rows that it was given."""
