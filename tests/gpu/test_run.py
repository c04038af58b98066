"""The command line on GPUs: devices are found, and a run ends with finite metrics."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests import logged
from tests.ray import commands


@pytest.mark.parametrize("strategy", ["local", "colocated", "hybrid3d"])
def test_ppo_runs(strategy: str, tmp_path: Path) -> None:
    words = f"--algo ppo --strategy {strategy} --trainer.max_steps 2 --trainer.logger CSVLogger"
    commands.run(f"rlhf fit {words} --trainer.logger.save_dir {tmp_path}", cwd=tmp_path)
    metrics = logged.csv_file(tmp_path)
    assert metrics
    assert all(math.isfinite(value) for values in metrics.values() for value in values)
