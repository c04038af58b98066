"""The garbage collector during a run, and after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rlhf_lightning.garbage import at_rest, collect_rarely


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """The session has frozen its modules."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_present_objects_are_exempt_until_it_is_restored() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    mine = [object() for _ in range(3)]
    restore = collect_rarely()
    assert gc.get_freeze_count() > frozen
    assert all(found is not mine for found in gc.get_objects())
    assert gc.get_threshold()[0] > before[0]
    restore()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_who_has_frozen_more_keeps_it() -> None:
    outer = collect_rarely()
    frozen, mine = gc.get_freeze_count(), [object()]
    restore = collect_rarely()
    assert any(found is mine for found in gc.get_objects()), "what is new is looked at"
    restore()
    assert gc.get_freeze_count() > 0.9 * frozen  # but for what nobody needs any more
    outer()
    assert gc.get_freeze_count() == 0


def test_it_is_at_rest_within_and_as_before_afterwards() -> None:
    with at_rest():
        assert not gc.isenabled()
        with at_rest():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
