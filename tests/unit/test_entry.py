"""The console command."""

from __future__ import annotations

import subprocess
import sys

from rlhf_lightning import __version__


def test_the_version_is_said_without_importing_torch() -> None:
    code = (
        "import sys; sys.argv = ['rlhf', '--version']; from rlhf_lightning.entry import main; main();"
        "sys.exit('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout == f"rlhf {__version__}\n"
