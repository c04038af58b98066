"""Runs that are asked to end: by a scheduler (SIGTERM to the controller) or a terminal (SIGINT to all)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ray.runs import Run, saved_step, write_config


def by_a_scheduler(run: Run) -> None:
    """As Slurm and Kubernetes do before they kill."""
    run.process.terminate()


def from_a_terminal(run: Run) -> None:
    """Ctrl-C reaches all processes of the group in the foreground."""
    os.killpg(run.process.pid, signal.SIGINT)


@pytest.mark.parametrize("ask", [by_a_scheduler, from_a_terminal])
def test_it_ends_soon_and_keeps_its_last_checkpoint(
    ask: Callable[[Run], None], tiny: Path, tmp_path: Path
) -> None:
    with Run(write_config(tmp_path, tiny), "--trainer.max_steps", "1000", "--data.num_rows", "7000") as run:
        while saved_step(run.checkpoints) < 2:
            assert run.process.poll() is None, run.output.read_text()[-3000:]
            time.sleep(0.1)
        asked = time.monotonic()
        ask(run)
        code = run.wait()
        run.gone(within_s=20 - (time.monotonic() - asked))
        said = run.output.read_text()
    assert code not in (0, -signal.SIGKILL), said[-2000:]
    assert "Traceback" not in said, said[-2000:]
    saved = saved_step(run.checkpoints)
    assert saved >= 2
    assert [path.name for path in run.checkpoints.iterdir()] == ["last.ckpt"]
