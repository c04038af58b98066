"""`rlhf fit` as a process of its own, stopped in the middle of something, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import yaml  # type: ignore[import-untyped]

from tests.leaks import MARK, Status, ancestors, process_table
from tests.ray.model import ENDS, ROWS, SCORES, STEPS

RUN = "RLHF_LIGHTNING_TEST_RUN"
"""Environment variable by which the processes of one run are known."""
DEVICE = "ray::DeviceActor"
"""Title of a device's process."""
BUSY = f"{DEVICE}."
"""How that title begins while it runs a call."""
PATIENCE_S = 180.0
"""Longest wait for anything."""


def write_config(directory: Path, model: Path) -> Path:
    """The run of `model.ppo` as a configuration, with a checkpoint after every iteration."""
    optimizer, sampling = {"lr": 1e-4}, {"max_new_tokens": 6, "stop_token_ids": list(ENDS)}
    checkpoint = {"dirpath": str(directory / "checkpoints"), "filename": "last", "every_n_train_steps": 1}
    config = {
        "algo": {
            "class_path": "ppo",
            "init_args": {
                "actor": {"path": str(model), "optimizer": optimizer, "sampling": sampling},
                "critic": {"optimizer": optimizer},
                "reference": {"decay": 0.5},
                "reward": {"functions": SCORES},
                "mini_batch_size": 4,
                "kl": {"target": 1.0, "horizon": 100.0},
            },
        },
        "data": {
            "class_path": "taskdata",
            "init_args": {"num_rows": 3 * ROWS, "num_val_rows": 2, "batch_size": ROWS},
        },
        "trainer": {
            "max_steps": STEPS,
            "default_root_dir": str(directory),
            "logger": False,
            "enable_progress_bar": False,
            "limit_val_batches": 0,
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {**checkpoint, "enable_version_counter": False},
                }
            ],
        },
    }
    path = directory / "fit.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Run:
    """A process of `rlhf fit`."""

    def __init__(self, config: Path, *options: str, address: str = "") -> None:
        """Start it.

        Args:
            config: what `write_config` wrote.
            options: more of the command line.
            address: of a running cluster; it starts Ray itself where empty.
        """
        name = uuid.uuid4().hex
        self.checkpoints = config.parent / "checkpoints"
        self.output = config.parent / f"{name}.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_lightning", "fit", "-c", str(config), *options],
                env={**os.environ, RUN: name, "RAY_ADDRESS": address},
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_heed_interrupts,  # noqa: PLW1509 - it only resets a signal
            )
        # A running cluster starts the devices: they have its environment, not that of the run.
        self._mark = f"{MARK}={os.environ[MARK]}" if address else f"{RUN}={name}"
        self._title = DEVICE if address else ""
        self._seen: set[tuple[int, int]] = set()

    def processes(self) -> dict[int, str]:
        """Titles by number: all that the run started, or only its devices on a running cluster.

        Ray writes a title over a part of the environment, the mark with it: what was once seen is remembered.
        """
        table = dict(process_table())
        for pid, status in table.items():
            if self._started(pid, table) or self._mark in _read(str(pid), "environ"):
                self._seen.add((pid, status.started))
        mine = [pid for pid, status in table.items() if (pid, status.started) in self._seen]
        titles = {pid: _read(str(pid), "cmdline") for pid in mine}
        return {pid: title for pid, title in titles.items() if title.startswith(self._title)}

    def _started(self, pid: int, table: Mapping[int, Status]) -> bool:
        """Tell whether it is the run's own process or below it."""
        return pid == self.process.pid or self.process.pid in ancestors(pid, table)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left of it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.gone()

    def wait(self) -> int:
        """Wait for the end; the exit code."""
        return self.process.wait(PATIENCE_S)

    def gone(self, *, within_s: float = PATIENCE_S, besides: tuple[str, ...] = ()) -> None:
        """Wait until no process of it is there; those of some titles, which end later, are ended here."""
        deadline = time.monotonic() + within_s
        while left := self.processes():
            assert time.monotonic() < deadline, left
            if all(title.startswith(besides) for title in left.values()):
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def held(self, *, after: int) -> int:
        """Stop a device in the middle of a call, so that the controller waits for it; its process number.

        Args:
            after: iteration whose checkpoint must be there before.
        """
        began = time.monotonic()
        while saved_step(self.checkpoints) < after:
            self._check_alive(began)
            time.sleep(0.01)
        devices = [pid for pid, title in self.processes().items() if title.startswith(DEVICE)]
        while True:
            for pid in devices:
                if self._hold(pid):
                    return pid
            self._check_alive(began)
            time.sleep(0.001)

    def _hold(self, pid: int) -> bool:
        if self._is_saving() or not _read(str(pid), "cmdline").startswith(BUSY):
            return False
        os.kill(pid, signal.SIGSTOP)
        if _read(str(pid), "cmdline").startswith(BUSY) and not self._is_saving():
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    def _check_alive(self, began: float) -> None:
        lives = self.process.poll() is None
        assert lives, self.output.read_text()[-3000:]
        assert time.monotonic() - began < PATIENCE_S

    def _is_saving(self) -> bool:
        return any(self.checkpoints.glob(".saving-*"))


def _heed_interrupts() -> None:
    """As in a terminal: what runs in the background of a shell ignores them, and so does what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def devices() -> dict[int, str]:
    """Titles, by number, of the device processes that this one has started, directly or not."""
    table = dict(process_table())
    found = {pid: _read(str(pid), "cmdline") for pid in table if os.getpid() in ancestors(pid, table)}
    return {pid: title for pid, title in found.items() if title.startswith(DEVICE)}


def saved_step(checkpoints: Path) -> int:
    """Iteration of the last checkpoint; 0 where there is none."""
    try:
        content = json.loads((checkpoints / "last.ckpt" / "trainer.json").read_text())
    except FileNotFoundError:
        return 0
    return int(content["state"]["global_step"])


def _read(pid: str, name: str) -> str:
    try:
        return Path("/proc", pid, name).read_bytes().rstrip(b"\0 ").decode(errors="replace")
    except OSError:  # ended meanwhile
        return ""
