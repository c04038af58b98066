"""What a process finds as it was after it has imported the package."""

from __future__ import annotations

import subprocess
import sys


def test_cudnns_attention_is_left_on() -> None:
    """The process may be a user's, who only imports, and has models of his own."""
    command = "import rlhf_lightning.algos, torch; print(torch.backends.cuda.cudnn_sdp_enabled())"
    done = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True"]
