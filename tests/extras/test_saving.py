"""What saving a model says where DeepSpeed is installed, which transformers then imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import os, sys
from pathlib import Path
from rlhf_lightning.engines import FSDPEngine
from rlhf_lightning.spec import ModelSpec
before = dict(os.environ)
FSDPEngine(ModelSpec()).export(Path(sys.argv[1]))
assert "deepspeed" in sys.modules, "nothing is shown"
assert os.environ == before
"""


def test_deepspeed_says_nothing_of_a_host_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "Setting accelerator to CPU" not in run.stdout + run.stderr
