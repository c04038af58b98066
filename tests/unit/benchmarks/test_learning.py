"""The settings of the learning benchmark are options that the algorithms have."""

from __future__ import annotations

import pytest

from benchmarks.learning_runs import ENTRIES


@pytest.mark.parametrize("name", ENTRIES)
def test_every_algorithm_can_be_made(name: str) -> None:
    assert "actor" in ENTRIES[name].make().roles()
