"""The command line on GPUs: devices are found and computed on, and a run ends with finite metrics."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")

from tests import logged
from tests.ray import commands

LEAST_GB, MOST_GB = 0.001, 0.5
"""What a GPU's allocator gives to PPO's 1.2 M parameters; of an idle GPU it gives nothing. Of a process that
computes on CPUs all that is resident counts, 0.6 GB and more.
"""


@pytest.mark.parametrize("strategy", ["local", "colocated", "hybrid3d"])
def test_ppo_runs(strategy: str, tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    held_gb = torch.cuda.memory_allocated() / 1e9 if strategy == "local" else 0.0  # the models are in here
    words = f"--algo ppo --strategy {strategy} --trainer.max_steps 2 --trainer.logger CSVLogger"
    commands.run(f"rlhf fit {words} --trainer.logger.save_dir {tmp_path}", cwd=tmp_path)
    metrics = logged.csv_file(tmp_path)
    assert metrics
    assert all(math.isfinite(value) for values in metrics.values() for value in values)
    for gigabytes in metrics["memory/device_gb"]:
        assert held_gb + LEAST_GB < gigabytes < held_gb + MOST_GB
