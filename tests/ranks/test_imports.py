"""What a device imports before anything else."""

from __future__ import annotations

import subprocess
import sys


def test_what_a_device_imports_is_not_looked_at_meanwhile() -> None:
    """Torch and tensordict make a million objects; what comes before them is Python's own start."""
    asked = "import gc, rlhf_lightning.controller; print(gc.get_stats()[0]['collections'], gc.isenabled())"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    looks, enabled = told.stdout.split()
    assert int(looks) < 50
    assert enabled == "True"
