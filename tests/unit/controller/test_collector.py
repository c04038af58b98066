"""The garbage collector during a run, and after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rlhf_lightning.controller.collector import rest


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """The session has frozen its modules."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_is_there_is_not_looked_at_until_it_wakes() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    mine = [object() for _ in range(3)]
    wake = rest()
    assert gc.get_freeze_count() > frozen
    assert all(found is not mine for found in gc.get_objects())
    assert gc.get_threshold()[0] > before[0]
    wake()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_who_has_frozen_more_keeps_it() -> None:
    outer = rest()
    frozen = gc.get_freeze_count()
    wake = rest()
    wake()
    assert gc.get_freeze_count() > 0.9 * frozen  # but for what nobody needs any more
    outer()
    assert gc.get_freeze_count() == 0
