"""Fixtures of more than one folder."""

from __future__ import annotations

import pytest

from tests.unit.rlhf import Rlhf


@pytest.fixture
def rlhf(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Rlhf:
    """The `rlhf` command, in this process."""
    return Rlhf(monkeypatch=monkeypatch, capfd=capfd)
