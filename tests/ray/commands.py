"""Commands as the documents write them, run in the process and on the cluster of the tests."""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from rlhf_lightning import entry


def run(line: str, *, cwd: Path) -> None:
    """Run `rlhf ...` or `python file.py ...` in a directory; it must end well."""
    if code := exit_code(line, cwd=cwd):
        pytest.fail(f"{line}: exit code {code}")


def exit_code(line: str, *, cwd: Path) -> object:
    """Run it and say how it ended; nothing, or 0, is well."""
    program, *words = shlex.split(line)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "path", list(sys.path))
        for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "WANDB_MODE"):  # Lightning sets them
            patch.setenv(name, os.environ.get(name, "0"))
        patch.setattr(sys, "argv", [program, *words])
        try:
            if program == "python":
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
            else:
                assert program == "rlhf"
                entry.main()
        except SystemExit as end:
            return end.code
    return None
