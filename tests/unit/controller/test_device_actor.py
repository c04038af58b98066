"""What a device sees that Ray has started."""

from __future__ import annotations

import os

import pytest
import ray

from rlhf_lightning.controller.cluster import DeviceActor


@pytest.mark.parametrize(("told", "seen"), [("1", "5"), ("true", "5"), ("0", "0,1"), (None, "0,1")])
def test_a_device_sees_its_own_gpu_alone(
    told: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", raising=False)
    if told is not None:
        monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", told)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [5])
    DeviceActor(0, gpu=True)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
