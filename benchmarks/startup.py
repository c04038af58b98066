"""Seconds from the command to the first training step of the embedded default, part by part.

    python -m benchmarks.startup --rounds 3

Each round is `rlhf fit --algo ppo` in a process of its own, stopped after its first iteration. Writes
results/startup.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from benchmarks import environments
from benchmarks.spread import machine, spread

BEGAN, FILE = "RLHF_LIGHTNING_BENCHMARK_BEGAN", "RLHF_LIGHTNING_BENCHMARK_FILE"
STEPS = ("imported", "placed", "first step", "first step done")
"""The program's own modules are here; models are on their devices; the first batch is here; it is learned."""


class Moments(Callback):
    """Notes the seconds since the command was typed."""

    def __init__(self) -> None:
        """The command line makes it once everything is imported."""
        self._seconds = {"imported": self._now()}

    def _now(self) -> float:
        return time.time() - float(os.environ[BEGAN])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The strategy has set up its devices."""
        self._seconds["placed"] = self._now()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """The first of all."""
        self._seconds.setdefault("first step", self._now())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """It is the last too."""
        self._seconds["first step done"] = self._now()
        Path(os.environ[FILE]).write_text(json.dumps(self._seconds))


def once(options: list[str]) -> dict[str, float]:
    """One run."""
    command = [str(Path(sys.executable).with_name("rlhf")), "fit", "--algo", "ppo", *options]
    command += ["--trainer.callbacks+=benchmarks.startup.Moments", "--trainer.max_steps", "1"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "moments.json"
        command += ["--trainer.default_root_dir", folder]
        environment = {**os.environ, BEGAN: str(time.time()), FILE: str(file)}
        subprocess.run(command, env=environment, check=True, capture_output=True)  # noqa: S603
        found: dict[str, float] = json.loads(file.read_text())
        return found


def main() -> None:
    """Measure, print, and write the result."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("options", nargs="*", help="more of the command line, after --")
    args = parser.parse_args()
    rounds = [once(args.options) for _ in range(args.rounds)]
    steps = {step: spread([found[step] for found in rounds]) for step in STEPS}
    for step, seconds in steps.items():
        print(f"{step:<16}{seconds} s")
    result = {"machine": machine(), "rounds": rounds, "steps": {n: one.as_dict() for n, one in steps.items()}}
    print(f"written: {environments.write_result('startup', result)}")


if __name__ == "__main__":
    main()
