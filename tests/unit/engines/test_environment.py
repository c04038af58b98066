"""What is set in the environment for a library, and put back."""

from __future__ import annotations

import os

import pytest

from rlhf_lightning.engines.environment import environment


def test_all_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "before")
    before = dict(os.environ)
    with environment({"CHANGED": "within"}):
        assert os.environ["CHANGED"] == "within"
        os.environ["ADDED"] = os.environ.pop("REMOVED")
    assert dict(os.environ) == before
