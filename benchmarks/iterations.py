"""What `throughput.py` measures, the same for every trainer: the seconds of whole iterations."""

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workload import Workload, tokens_per_iteration

ALGORITHMS = ("grpo", "ppo")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of one trainer.

    Example: `Run(algo="grpo", workload=workload, processes=2)`.
    """

    algo: str
    """"grpo" or "ppo"."""

    workload: Workload
    """Model and prompts."""

    processes: int = 1
    """Devices (processes) that share the 64 sequences of an iteration."""

    iterations: int = 4
    """Iterations that are timed."""

    warmup: int = 1
    """Iterations before them that are not."""

    micro_batches: int = 1
    """Micro-batches of an update in each process, where the trainer does not choose them itself."""

    kl: float | None = None
    """KL coefficient; None is the default of TRL's trainer (GRPO 0, then no reference model; PPO 0.05)."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of each timed iteration."""

    iterations: Sequence[float]
    """One number an iteration, from the end of one to the end of the next."""

    def tokens_per_s(self) -> float:
        """Prompt and response tokens of the global batch a second, by the median iteration."""
        return tokens_per_iteration() / statistics.median(self.iterations)


@dataclass
class Stopwatch:
    """Notes the ends of iterations."""

    ends: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def lap(self) -> None:
        """An iteration ended now."""
        self.ends.append(time.perf_counter())
        self.cpu_s.append(time.process_time())

    def seconds(self, run: Run) -> Seconds:
        """The timed iterations: those after the end of the last warm-up iteration."""
        return Seconds(iterations=_differences(self.ends[run.warmup - 1 :]))

    def cpu_seconds(self, run: Run) -> list[float]:
        """CPU seconds of this process in each timed iteration: hardly moved by what else the machine does."""
        return _differences(self.cpu_s[run.warmup - 1 :])


def _differences(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def from_command_line() -> Run:
    """The run that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--algo", choices=ALGORITHMS, required=True)
    parser.add_argument("--workload", type=Path, required=True, help="directory that workload.write filled")
    parser.add_argument("--processes", type=int, default=Run.processes)
    parser.add_argument("--iterations", type=int, default=Run.iterations)
    parser.add_argument("--micro_batches", type=int, default=Run.micro_batches)
    parser.add_argument("--kl", type=float, default=None)
    args = vars(parser.parse_args())
    return Run(**args | {"workload": Workload.under(args["workload"])})
