"""What is set in the environment for a library, and put back."""

from __future__ import annotations

import os

import pytest
import torch

from rlhf_lightning.engines.environment import environment, for_deepspeed


def test_all_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "before")
    before = dict(os.environ)
    with environment({"CHANGED": "within"}):
        assert os.environ["CHANGED"] == "within"
        os.environ["ADDED"] = os.environ.pop("REMOVED")
    assert dict(os.environ) == before


@pytest.mark.parametrize(("gpu", "told"), [(False, {"DS_ACCELERATOR": "cpu"}), (True, {})])
def test_deepspeed_is_told_of_a_host_without_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, *, gpu: bool, told: dict[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert for_deepspeed() == told
