"""Runs that are asked to end: by a scheduler (SIGTERM to the controller or to all) or a terminal (SIGINT)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ray.runs import DEVICE, Run, saved_step, write_config


def from_a_terminal(run: Run) -> None:
    """Ctrl-C reaches all processes of the group in the foreground."""
    os.killpg(run.process.pid, signal.SIGINT)


def by_timeout(run: Run) -> None:
    """As `timeout` and a shell's `kill %1` do; Ray is in other groups, so devices can still answer.

    The group is the controller alone, as Slurm and Kubernetes ask it before they kill.
    """
    group = run.process.pid
    assert [pid for pid in run.processes() if os.getpgid(pid) == group] == [group]
    os.killpg(group, signal.SIGTERM)


def with_ray(run: Run) -> None:
    """As on systems where Ray is in the same group: its own processes end before the controller asks them."""
    for pid, title in run.processes().items():
        if not title.startswith((DEVICE, "ray::IDLE")):
            os.kill(pid, signal.SIGTERM)


@pytest.mark.parametrize(("ask", "ends"), [(from_a_terminal, 1), (by_timeout, 143), (with_ray, 143)])
def test_it_ends_soon_and_keeps_its_last_checkpoint(
    ask: Callable[[Run], None], ends: int, tiny: Path, tmp_path: Path
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
    assert code == ends, said[-2000:]
    assert "Traceback" not in said, said[-2000:]
    saved = saved_step(run.checkpoints)
    assert saved >= 2
    # What a device was writing may be left: the next checkpoint removes it.
    whole = [path.name for path in run.checkpoints.iterdir() if not path.name.startswith(".saving-")]
    assert whole == ["last.ckpt"]


def test_it_ends_as_soon_while_its_devices_start(tiny: Path, tmp_path: Path) -> None:
    with Run(write_config(tmp_path, tiny)) as run:
        while not any(title.startswith(DEVICE) for title in run.processes().values()):
            assert run.process.poll() is None, run.output.read_text()[-3000:]
            time.sleep(0.1)
        asked = time.monotonic()
        run.process.terminate()
        code = run.wait()
        run.gone(within_s=20 - (time.monotonic() - asked))
        said = run.output.read_text()
    assert code == 143, said[-2000:]
    assert "SIGTERM received at" not in said, said[-2000:]
