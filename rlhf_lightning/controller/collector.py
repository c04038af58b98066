"""Python's garbage collector in a process that calls many workers: its looks took longer than the calls."""

from __future__ import annotations

import gc
from collections.abc import Callable

_OBJECTS = 100_000
"""New ones between two looks; seven calls to 1,024 workers make about twice as many, without a cycle."""


def rest() -> Callable[[], None]:
    """Keep all that is there, modules above all, from the collector's eyes, and let it look less often.

    A process that has frozen what is there by itself keeps that, now and afterwards.

    Returns:
        What makes it as it was.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    if not frozen:
        gc.collect()
        gc.freeze()
    gc.set_threshold(_OBJECTS)

    def wake() -> None:
        if not frozen:
            gc.unfreeze()
        gc.set_threshold(*before)

    return wake
