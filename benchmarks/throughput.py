"""Whole iterations of four algorithms beside TRL's and verl's trainers and a bound, in turns in the same run.

    python benchmarks/throughput.py --rounds 3
    python benchmarks/throughput.py --lengths ragged
    python benchmarks/throughput.py --dtypes float32 bfloat16
    python benchmarks/throughput.py --quick --algos grpo

Every trainer runs the workload of workload.py (64 sequences, Llama of hidden 256 x 4 layers, vocabulary
4,096, rule reward) with one epoch and one update an iteration: prompts of 64 and responses of 128
tokens, or ragged ones of 16 to 64 and 8 to 128, drawn with other seeds in each round. Tokens are those of
each system's own prompts and responses, without padding. TRL (GRPO 1.16, PPO 1.12) and verl 0.5.0 run GRPO
and PPO. A trial of one iteration tries every setting of each side: the peers' one and two processes and one
or four micro-batches, TRL's GRPO with its own generation and vLLM's, ours on one and two devices, all in
each of `--dtypes` (float32 as a rule).
The rounds repeat each side's best, ours right behind each peer: ratios are of such neighbours. A setting that
fails in the trial is left out.

Prints tokens/s, lengths, ours over each peer, and the share of the bound that bound.py counts, at the rate of
matrix products, the better of those measured right before and right after a run. Writes, after each round,
results/throughput.json, throughput-ragged.json and the like.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import bound
import environments
import torch
import workload
from iterations import ALGORITHMS, Dtype, Generator, Measured
from spread import Spread, machine, spread
from workload import Lengths

CORES = 2
PEERS: Mapping[str, tuple[str, ...]] = {"trl": ("grpo", "ppo"), "verl": ("grpo", "ppo")}
"""Their algorithms."""
SYSTEMS = (*PEERS, "ours")
ITERATIONS: Mapping[Lengths, int] = {"fixed": 3, "ragged": 12}
"""That are timed: as many as bring the mean of random lengths within 3% of what is expected."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How one system runs."""

    system: str
    """One of SYSTEMS."""

    processes: int
    """Processes (devices), which share the cores."""

    micro_batches: int = 1
    """Micro-batches of an update (the peers' are set by hand)."""

    generator: Generator = "own"
    """What generates."""

    dtype: Dtype = "float32"
    """What models compute in."""

    def __str__(self) -> str:
        """For the printed lines."""
        vllm = ", vLLM" if self.generator == "vllm" else ""
        sizes = f"{self.processes} process(es), {self.micro_batches} micro-batch(es)"
        return f"{self.system}, {sizes}, {self.dtype}{vllm}"

    def script(self, algo: str) -> tuple[Path, Path]:
        """The interpreter and the file that run it; the environment is made on first use."""
        if self.system == "ours":
            return Path(sys.executable), environments.HERE / "ours_throughput.py"
        name = {"own": f"trl-{algo}", "vllm": "trl-vllm"}[self.generator]
        file = {"own": f"trl_{algo}.py", "vllm": "trl_vllm.py"}[self.generator]
        if self.system == "verl":
            name, file = "verl-train", "verl_train.py"
        return environments.python(name), environments.HERE / "peers" / file


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run, in processes of its own."""

    algo: str
    setting: Setting
    measured: Measured
    rate: float
    """Operations a second in products of large matrices, on all cores: the better of before and after it."""

    @property
    def side(self) -> tuple[str, str]:
        """Algorithm and system."""
        return self.algo, self.setting.system

    def share(self, lengths: Lengths) -> float:
        """Of the median iteration, the seconds of its operations at `rate` over those that it took."""
        config, samples = workload.config(lengths), workload.samples_per_prompt(self.algo)
        found = []
        one = self.measured
        for prompts, rows, seconds in zip(one.prompt_tokens, one.response_tokens, one.seconds, strict=True):
            batch = bound.Batch(
                prompts=prompts / samples, responses=sum(rows), rows=len(rows), samples=samples
            )
            found.append(batch.iteration_flop(config, self.algo) / self.rate / seconds)
        return statistics.median(found)

    def shown(self) -> str:
        """A printed line."""
        lengths, more = self.measured.lengths(), self.measured.more
        text = (
            f"  {self.algo}, {self.setting}: {self.measured.tokens_per_s():.0f} tokens/s, responses of "
            f"{statistics.mean(lengths):.1f} [{min(lengths)} .. {max(lengths)}] tokens, products "
            f"{self.rate / 1e12:.3f} TFLOP/s"
        )
        if "methods_s" in more:
            each = ", ".join(f"{name} {seconds:.2f}" for name, seconds in more["methods_s"].items())
            text += f" (seconds: {each})"
        return text


def settings(algo: str, system: str, dtypes: Sequence[Dtype]) -> list[Setting]:
    """All that a system has for an algorithm; the first is the best as a rule."""
    if system != "ours" and algo not in PEERS[system]:
        return []
    micro_batches = (1,) if system == "ours" else (4, 1)
    generators: tuple[Generator, ...] = ("own", "vllm") if (algo, system) == ("grpo", "trl") else ("own",)
    return [
        Setting(system=system, processes=p, micro_batches=m, generator=generator, dtype=dtype)
        for dtype, generator, p, m in itertools.product(dtypes, generators, (2, 1), micro_batches)
    ]


def measure(algo: str, setting: Setting, *, iterations: int, lengths: Lengths, seed: int = 0) -> Measured:
    """Run one setting."""
    interpreter, script = setting.script(algo)
    given = {
        "algo": algo,
        "workload": directory(lengths),
        "lengths": lengths,
        "processes": setting.processes,
        "iterations": iterations,
        "micro_batches": setting.micro_batches,
        "generator": setting.generator,
        "dtype": setting.dtype,
        "seed": seed,
    }
    output = environments.run(
        interpreter,
        script,
        environments.options(given),
        processes=setting.processes if setting.system == "trl" else 1,
        threads=CORES // setting.processes,
    )
    return Measured(**output)  # type: ignore[arg-type]  # as written


def directory(lengths: Lengths) -> Path:
    """Of a workload."""
    return environments.RESULTS / ("workload" if lengths == "fixed" else f"workload-{lengths}")


def choose(args: argparse.Namespace) -> dict[tuple[str, str], list[Setting]]:
    """The setting of each side that was best in a trial of all that run; with `--quick` its first."""
    sides = itertools.product(args.algos, args.systems)
    every = {side: found for side in sides if (found := settings(*side, args.dtypes))}
    if args.quick:
        return {side: found[:1] for side, found in every.items()}
    print("trial", flush=True)
    turns = [(algo, setting) for (algo, _), found in every.items() for setting in found]
    ran = sorted(trial(turns, lengths=args.lengths), key=lambda run: -run.measured.tokens_per_s())
    return {side: [run.setting for run in ran if run.side == side][:1] for side in every}


def trial(turns: Sequence[tuple[str, Setting]], *, lengths: Lengths) -> Iterator[Ran]:
    """One iteration of each setting; those that fail are left out."""
    for algo, setting in turns:
        try:
            yield from one_round([(algo, setting)], iterations=1, lengths=lengths, seed=0)
        except (RuntimeError, subprocess.TimeoutExpired) as err:
            print(f"  {algo}, {setting}: left out, as it failed: {err}", flush=True)


def in_pairs(chosen: Mapping[tuple[str, str], Sequence[Setting]]) -> list[tuple[str, Setting]]:
    """The runs of a round, by algorithm: each peer's and ours behind it; ours alone where no peer runs."""
    turns = []
    for algo in dict.fromkeys(algo for algo, _ in chosen):
        ours = chosen.get((algo, "ours"), ())
        peers = [setting for peer in PEERS for setting in chosen.get((algo, peer), ())]
        neighbours = [setting for peer in peers for setting in (peer, *ours)]
        turns += [(algo, setting) for setting in neighbours or ours]
    return turns


def one_round(
    turns: Sequence[tuple[str, Setting]], *, iterations: int, lengths: Lengths, seed: int
) -> list[Ran]:
    """Run settings of algorithms one behind the other, with products measured before and after each."""
    dtypes = {setting.dtype for _, setting in turns}
    runs, before = list[Ran](), products(dtypes)
    for algo, setting in turns:
        measured = measure(algo, setting, iterations=iterations, lengths=lengths, seed=seed)
        after = products(dtypes)
        runs.append(Ran(algo=algo, setting=setting, measured=measured, rate=max(before, after)))
        print(runs[-1].shown(), flush=True)
        before = after
    return runs


def products(dtypes: Iterable[Dtype]) -> float:
    """Operations a second now, in the fastest of these types."""
    return max((bound.matrix_rate(CORES, getattr(torch, dtype)) for dtype in dtypes), default=0.0)


def pairs(runs: Sequence[Ran], algo: str, peer: str) -> list[tuple[Ran, Ran]]:
    """The peer's runs in a round, each with ours right behind it."""
    sides = (algo, peer), (algo, "ours")
    return [(one, other) for one, other in itertools.pairwise(runs) if (one.side, other.side) == sides]


def compared(rounds: Sequence[Sequence[Ran]], algo: str, lengths: Lengths) -> dict[str, dict[str, Spread]]:
    """Of each system that ran: tokens/s, share of the bound, and ours over its tokens/s in each pair."""
    found = {}
    for system in SYSTEMS:
        runs = [run for each in rounds for run in each if run.side == (algo, system)]
        if not runs:
            continue
        found[system] = {
            "tokens_per_s": spread([run.measured.tokens_per_s() for run in runs]),
            "share_of_bound": spread([run.share(lengths) for run in runs]),
        }
        if near := [pair for each in rounds for pair in pairs(each, algo, system)]:
            ratios = [mine.measured.tokens_per_s() / its.measured.tokens_per_s() for its, mine in near]
            found[system]["ours_over_it"] = spread(ratios)
    return found


def result(args: argparse.Namespace, rounds: Sequence[Sequence[Ran]]) -> dict[str, object]:
    """What is written."""
    found = {algo: compared(rounds, algo, args.lengths) for algo in args.algos}
    return {
        "machine": machine(),
        "lengths": args.lengths,
        "dtypes": args.dtypes,
        "rounds": [[asdict(run) for run in each] for each in rounds],
        "compared": {
            algo: {system: {n: one.as_dict() for n, one in ns.items()} for system, ns in systems.items()}
            for algo, systems in found.items()
        },
    }


def show(rounds: Sequence[Sequence[Ran]], algo: str, lengths: Lengths) -> None:
    """Print what an algorithm's systems come to."""
    for system, numbers in compared(rounds, algo, lengths).items():
        ratio = f", ours over it {numbers['ours_over_it']}" if "ours_over_it" in numbers else ""
        share = numbers["share_of_bound"]
        print(f"{algo}, {system}: {numbers['tokens_per_s']} tokens/s, {share} of the bound{ratio}")


def named(args: argparse.Namespace) -> list[str]:
    """Parts of the result's name: what is not as a rule."""
    lengths = [] if args.lengths == "fixed" else [args.lengths]
    return lengths + ([] if args.dtypes == ["float32"] else args.dtypes)


def main() -> None:
    """Measure in turns, print, and write the result."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--iterations",
        type=int,
        default=0,
        help="timed iterations of each run, after one that is not; 0: 3, or 12 of ragged lengths",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=get_args(Dtype),
        default=["float32"],
        help="what models may compute in: each side's best of them",
    )
    parser.add_argument("--lengths", choices=get_args(Lengths), default="fixed")
    parser.add_argument("--algos", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--quick", action="store_true", help="1 round of 1 iteration in one setting of each")
    args = parser.parse_args()
    if args.quick:
        args.rounds = args.iterations = 1
    workload.write(directory(args.lengths), args.lengths)
    chosen, rounds = choose(args), list[list[Ran]]()
    turns, name = in_pairs(chosen), "-".join(["throughput", *named(args)])
    iterations = args.iterations or ITERATIONS[args.lengths]
    try:
        for number in range(1, args.rounds + 1):
            print(f"round {number}", flush=True)
            rounds.append(one_round(turns, iterations=iterations, lengths=args.lengths, seed=number))
            print(f"written: {environments.write_result(name, result(args, rounds))}", flush=True)
    finally:
        for algo in args.algos:
            show(rounds, algo, args.lengths)
    if lost := [", ".join(side) for side, found in chosen.items() if not found]:
        raise SystemExit(f"no setting ran: {'; '.join(lost)}")


if __name__ == "__main__":
    main()
