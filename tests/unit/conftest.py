"""Fixtures of more than one folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.rlhf import Rlhf


@pytest.fixture
def rlhf(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Rlhf:
    """The `rlhf` command, in this process."""
    from tests.unit.rlhf import Rlhf  # here, since a session that only hands tests to others needs no torch

    return Rlhf(monkeypatch=monkeypatch, capfd=capfd)
