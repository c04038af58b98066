"""The process of the console command, and what the package says without one."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_lightning
from rlhf_lightning import __version__, algorithm, strategy
from tests.unit.rlhf import Rlhf


def test_the_garbage_collector_looks_at_no_module(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rlhf_lightning.commands.reshard", raising=False)
    gc.unfreeze()  # the session has frozen its modules
    try:
        assert rlhf.run("reshard", "--help")[0] == 0
        frozen = gc.get_freeze_count()
        assert frozen > len(gc.get_objects()), "modules are not looked at again"
        assert gc.isenabled()
        kept = [object()]
        assert rlhf.run("reshard", "--help")[0] == 0
        assert any(found is kept for found in gc.get_objects()), "later objects are looked at"
    finally:
        gc.freeze()


def test_the_version_is_said_without_importing_torch() -> None:
    program = (
        "import atexit, os, sys; from rlhf_lightning import entry; sys.argv = ['rlhf', '--version'];"
        "atexit.register(lambda: 'torch' in sys.modules and os._exit(1)); entry.main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, f"rlhf {__version__}\n")


def test_a_directory_that_is_gone_is_told(
    rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MKL would say that it cannot load torch, and end the process."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert rlhf.refused("reshard", "--help") == "the current directory is gone. Type `cd` first."


def test_the_classes_to_begin_with_are_named_at_the_top() -> None:
    assert rlhf_lightning.RLHFAlgorithm is algorithm.RLHFAlgorithm
    assert rlhf_lightning.Strategy is strategy.Strategy
    with pytest.raises(AttributeError, match="module 'rlhf_lightning' has no attribute 'PPO'"):
        rlhf_lightning.PPO  # type: ignore[attr-defined]  # noqa: B018
