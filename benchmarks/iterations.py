"""What `throughput.py` measures, the same for every trainer: seconds and tokens of whole iterations."""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from workload import PROMPT_TOKENS, RESPONSE_TOKENS, SEQUENCES, Lengths, Workload

Generator = Literal["own", "vllm"]
Dtype = Literal["float32", "bfloat16"]
ALGORITHMS = ("grpo", "ppo", "remax", "saferlhf")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of one trainer.

    Example: `Run(algo="grpo", workload=workload, processes=2)`.
    """

    algo: str
    """One of ALGORITHMS."""

    workload: Workload
    """Model and prompts."""

    lengths: Lengths = "fixed"
    """Which of the two workloads that is."""

    processes: int = 1
    """Devices (processes) that share the 64 sequences of an iteration."""

    iterations: int = 4
    """Iterations that are timed."""

    warmup: int = 1
    """Iterations before them that are not."""

    generator: Generator = "own"
    """What generates: what the trainer brings, or vLLM."""

    micro_batches: int = 1
    """Micro-batches of an update in each process, where the trainer does not choose them itself."""

    dtype: Dtype = "float32"
    """What models compute in."""

    seed: int = 0
    """Of what is drawn: the order of the prompts, and responses."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The timed iterations of one run."""

    seconds: Sequence[float]
    """One number an iteration, from the end of one to the end of the next."""

    prompt_tokens: Sequence[int]
    """Of each iteration: of all its sequences, without padding."""

    response_tokens: Sequence[Sequence[int]]
    """Of each iteration: of each sequence, its end token included, without padding."""

    more: Mapping[str, Any] = field(default_factory=dict)
    """What only some systems tell."""

    def tokens_per_s(self) -> float:
        """Tokens of prompts and responses of the global batch a second, in the median iteration."""
        every = zip(self.prompt_tokens, self.response_tokens, self.seconds, strict=True)
        return statistics.median(
            (prompts + sum(responses)) / seconds for prompts, responses, seconds in every
        )

    def lengths(self) -> list[int]:
        """Tokens of all responses."""
        return list(itertools.chain(*self.response_tokens))

    def check(self, run: Run) -> None:
        """Refuse a run whose iterations are not those of the workload.

        Raises:
            RuntimeError: iterations are missing, or have other numbers of sequences or tokens.
        """
        if len(self.seconds) != run.iterations:
            raise RuntimeError(f"{len(self.seconds)} timed iterations, not {run.iterations}")
        numbers = {len(responses) for responses in self.response_tokens}
        if numbers != {SEQUENCES}:
            raise RuntimeError(f"{sorted(numbers)} sequences in an iteration, not {SEQUENCES}")
        fixed = {SEQUENCES * PROMPT_TOKENS}, {RESPONSE_TOKENS}
        if run.lengths == "fixed" and (set(self.prompt_tokens), set(self.lengths())) != fixed:
            raise RuntimeError(
                f"prompts of {sorted(set(self.prompt_tokens))} tokens an iteration and responses of "
                f"{sorted(set(self.lengths()))}, not {SEQUENCES} of {PROMPT_TOKENS} and {RESPONSE_TOKENS}"
            )

    def as_json(self) -> str:
        """One line, the last that a measured script prints."""
        return json.dumps(asdict(self))


@dataclass
class Stopwatch:
    """Notes the ends of iterations, and the tokens of each."""

    ends: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=lambda: [0])
    response_tokens: list[list[int]] = field(default_factory=lambda: [[]])

    def note(self, prompts: int, responses: Iterable[int]) -> None:
        """Tokens of some sequences of this iteration: of all their prompts, and of each response."""
        self.prompt_tokens[-1] += prompts
        self.response_tokens[-1] += responses

    def lap(self) -> None:
        """An iteration ended now."""
        self.ends.append(time.perf_counter())
        self.prompt_tokens.append(0)
        self.response_tokens.append([])

    def measured(self, run: Run, **more: object) -> Measured:
        """The timed iterations: those after the end of the last warm-up iteration."""
        timed = slice(run.warmup, len(self.ends))
        return Measured(
            seconds=_differences(self.ends[run.warmup - 1 :]),
            prompt_tokens=self.prompt_tokens[timed],
            response_tokens=self.response_tokens[timed],
            more=more,
        )


def _differences(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def from_command_line() -> Run:
    """The run that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--algo", choices=ALGORITHMS, required=True)
    parser.add_argument("--workload", type=Path, required=True, help="directory that workload.write filled")
    parser.add_argument("--lengths", choices=get_args(Lengths), default=Run.lengths)
    parser.add_argument("--processes", type=int, default=Run.processes)
    parser.add_argument("--iterations", type=int, default=Run.iterations)
    parser.add_argument("--generator", choices=get_args(Generator), default=Run.generator)
    parser.add_argument("--micro_batches", type=int, default=Run.micro_batches)
    parser.add_argument("--dtype", choices=get_args(Dtype), default=Run.dtype)
    parser.add_argument("--seed", type=int, default=Run.seed)
    args = vars(parser.parse_args())
    return Run(**args | {"workload": Workload.under(args["workload"])})
