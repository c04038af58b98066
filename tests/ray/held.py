"""A run whose device stops for good in the middle of something, says so in a file, and is killed there."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

import yaml  # type: ignore[import-untyped]
from tensordict import TensorDict
from torch import Tensor, nn

from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, Metrics, Worker
from rlhf_lightning.engines.native import slots
from rlhf_lightning.engines.sampling import sample
from rlhf_lightning.rewards import Environment
from rlhf_lightning.spec import Sampling
from rlhf_lightning.workers import Actor
from tests.ray.commands import exit_code
from tests.ray.runs import BUSY, devices

PATIENCE_S = 120.0
"""Longest wait for a device to stop."""
SOON_S = 30.0
"""Longest time from a death until nothing of the run is left."""
Doing = Literal["", "answering", "sending"]
"""What a device is at when it stops; never where empty."""


@dataclass(frozen=True, kw_only=True)
class HeldActor(Actor):
    """Stops in the middle of what it is told to."""

    held: Doing = ""
    """In what."""
    marker: str = ""
    """The file that it writes its process number to."""

    def build(self, worker: Worker) -> None:
        """See `Role.build`; the first weights are on their way when it stops."""
        super().build(worker)
        weights = self.engine.weights

        def some() -> Iterator[tuple[str, Tensor]]:
            for number, named in enumerate(weights()):
                if number == 3:
                    self._stop()
                yield named

        if self.held == "sending":
            self.engine.weights = some  # type: ignore[method-assign]

    def answer(self, rows: TensorDict, *, greedy: bool, environment: Environment | None = None) -> TensorDict:
        """See `Actor.answer`; it stops at its fourth token."""
        steps = count()

        def look(*_: object) -> None:
            if next(steps) == 3:
                self._stop()

        def drawn(logits: Tensor, numbers: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
            look()
            return sample(logits, numbers, sampling)

        if self.held == "answering":
            vars(slots)["sample"] = drawn
            for name, module in self._vllm_model().named_modules():
                if name.endswith("embed_tokens"):
                    module.register_forward_pre_hook(look)
        return super().answer(rows, greedy=greedy, environment=environment)

    def _vllm_model(self) -> nn.Module:
        found = vars(self.generator).get("_model") or nn.Module()
        assert isinstance(found, nn.Module)
        return found

    def _stop(self) -> None:
        unfinished = Path(f"{self.marker}.unfinished")
        unfinished.write_text(str(os.getpid()))
        unfinished.rename(self.marker)
        time.sleep(10 * PATIENCE_S)


class Held(RLHFAlgorithm):
    """Only answers."""

    actor: HeldActor = field(default_factory=HeldActor)
    """Stops."""

    def step(self, batch: Batch) -> Metrics:
        answers = self.actor.generate_sequences(batch)
        return Metrics.of({"response/tokens": float(answers["response_mask"].sum())})


def write_held(directory: Path, model: Path, held: Doing) -> Path:
    """A run of `Held` as a configuration; its marker is `marker` in the directory."""
    actor = {
        "path": str(model),
        "sampling": {"max_new_tokens": 12},
        "held": held,
        "marker": str(directory / "marker"),
    }
    config = {
        "algo": {"class_path": "tests.ray.held.Held", "init_args": {"actor": actor}},
        "data": {"class_path": "taskdata", "init_args": {"num_rows": 8, "num_val_rows": 2, "batch_size": 4}},
        "trainer": {
            "max_steps": 1,
            "default_root_dir": str(directory),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "limit_val_batches": 0,
        },
    }
    path = directory / "held.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Killer(threading.Thread):
    """Kills a process once a device has stopped.

    Args:
        marker: where the device says so.
        victim: the number of the process to kill, by that of the one that stopped.
    """

    def __init__(self, marker: Path, victim: Callable[[int], int]) -> None:
        super().__init__(name="killer", daemon=True)
        self._marker, self._victim = marker, victim
        self.killed_at = 0.0
        """`time.monotonic()` then; 0 before."""

    def run(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self._marker.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        victim = self._victim(int(self._marker.read_text()))
        self.killed_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)


def itself(pid: int) -> int:
    """The device that stopped."""
    return pid


def the_other(pid: int) -> int:
    """The one other device that is in a call."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := [at for at, title in devices().items() if title.startswith(BUSY) and at != pid]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found[0]


def killed_within(limit_s: float, config: Path, options: str, *, victim: Callable[[int], int]) -> None:
    """Run what `write_held` wrote in this process; it must end with exit code 1, and its devices with it.

    Args:
        limit_s: from the death to the end.
        config: of the run.
        options: more of the command line.
        victim: who is killed.
    """
    killer = Killer(config.parent / "marker", victim)
    killer.start()
    assert exit_code(f"rlhf fit -c {config} {options}", cwd=config.parent) == 1
    killer.join()
    assert killer.killed_at
    while (left := devices()) or time.monotonic() > killer.killed_at + limit_s:
        assert time.monotonic() < killer.killed_at + limit_s, left
        time.sleep(0.05)


def assert_one_message(said: str, name: str) -> None:
    """The user reads of a death once, and no traceback.

    Args:
        said: on the standard error output.
        name: pattern of the call.
    """
    assert len(re.findall(rf"^rlhf: error: {name}: its process died", said, re.MULTILINE)) == 1, said
    assert said.count("rlhf: error") == 1, said
    assert "Traceback" not in said, said
