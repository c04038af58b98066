"""Where a process finds modules, so that devices find those that the controller has found and checked.

    a device looks into   1. the controller's folders before the standard library, such as the script's
                          2. its own before the library: those of a node's PYTHONPATH
                          3. the library and packages of its node
                          4. what the controller has behind the library, and at last its current folder
A runtime environment of Ray's brings copies of folders, or packages; then 2. comes before 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

_LIBRARY = os.path.dirname(os.__file__)
"""The folder of the standard library; what comes before it on `sys.path` is no installed package."""


@dataclass(frozen=True)
class ImportPath:
    """The folders of `sys.path`, in their order."""

    first: tuple[str, ...]
    """Before the standard library."""
    rest: tuple[str, ...]
    """The library and all behind it."""

    @classmethod
    def of_controller(cls) -> Self:
        """Those of this process; at last the current folder, into which Ray has devices look first."""
        found = (os.path.abspath(place) for place in (*sys.path, os.curdir) if os.path.exists(place or "."))
        return cls._split(found)

    @classmethod
    def _split(cls, places: Iterable[str]) -> Self:
        found = tuple(places)
        first = found.index(_LIBRARY) if _LIBRARY in found else len(found)
        return cls(found[:first], found[first:])

    def take(self, *, own_first: bool) -> None:
        """Make this process, a device, look into these folders as the controller does.

        Args:
            own_first: its own folders come before these, not behind them.
        """
        own = self._split(sys.path)
        kept = tuple(place for place in own.first if place not in (*self.first, *self.rest))
        first = kept + self.first if own_first else self.first + kept
        sys.path[:] = dict.fromkeys((*first, *own.rest, *self.rest))
