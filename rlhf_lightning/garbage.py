"""When Python looks for garbage: that took longer than calls to many workers, and a quarter of imports."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_ALLOCATIONS = 100_000
"""New objects between two collections; seven calls to 1,024 workers make about twice as many, none cyclic."""


def collect_rarely() -> Callable[[], None]:
    """Exempt all present objects, above all modules, from collection, and collect less often.

    Where the process has frozen objects of its own (`gc.freeze`), they stay frozen, now and afterwards.

    Returns:
        A function that restores the former settings.
    """
    threshold, already_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    if not already_frozen:
        gc.collect()
        gc.freeze()
    gc.set_threshold(_ALLOCATIONS)

    def restore() -> None:
        if not already_frozen:
            gc.unfreeze()
        gc.set_threshold(*threshold)

    return restore


@contextmanager
def at_rest() -> Iterator[None]:
    """Within this context nothing looks for garbage: importing modules took a quarter longer with it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
