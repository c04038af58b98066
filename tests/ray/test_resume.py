"""A resumed run learns what an uninterrupted one does, and its checkpoint holds nothing that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from rlhf_lightning.strategies import Colocated
from tests.ray.model import fit, furthest, ppo


def checkpoints(root: Path) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=root / "checkpoints", every_n_train_steps=1, save_last=True)


def test_stop_and_resume_on_other_devices_learns_the_same(tiny: Path, tmp_path: Path) -> None:
    uninterrupted, again = ppo(tiny), ppo(tiny)
    whole = fit(uninterrupted, Colocated(devices=1), tmp_path / "whole", steps=4)
    root = tmp_path / "parts"
    half = fit(ppo(tiny), Colocated(devices=1), root, steps=2, callbacks=[checkpoints(root)])

    files = [file for file in (root / "checkpoints").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    assert not [path.name for path in (root / "checkpoints").iterdir() if path.name.startswith(".")]

    resumed = fit(again, Colocated(devices=2), root, steps=4, callbacks=[checkpoints(root)], ckpt_path="last")
    assert furthest(half, whole) > 1e-4
    assert furthest(resumed, whole) < 1e-5
    coefficients = [float(algorithm.state_dict()["kl_coefficient"]) for algorithm in (again, uninterrupted)]
    assert coefficients[0] == pytest.approx(coefficients[1], rel=1e-6)
    assert coefficients[0] != again.kl_coef
