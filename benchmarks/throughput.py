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
The rounds repeat each side's best.

Prints tokens/s, lengths, ours over each peer, and the share of the bound that bound.py counts, at the rate of
matrix products that is measured in each round. Writes results/throughput.json, throughput-ragged.json
and the like.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
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

    def share(self, lengths: Lengths, rate: float) -> float:
        """Of the median iteration, the seconds of its operations at `rate` over those that it took."""
        config, samples = workload.config(lengths), workload.samples_per_prompt(self.algo)
        found = []
        one = self.measured
        for prompts, rows, seconds in zip(one.prompt_tokens, one.response_tokens, one.seconds, strict=True):
            batch = bound.Batch(
                prompts=prompts / samples, responses=sum(rows), rows=len(rows), samples=samples
            )
            found.append(batch.iteration_flop(config, self.algo) / rate / seconds)
        return statistics.median(found)

    def shown(self) -> str:
        """A printed line."""
        lengths, more = self.measured.lengths(), self.measured.more
        text = (
            f"  {self.algo}, {self.setting}: {self.measured.tokens_per_s():.0f} tokens/s, responses of "
            f"{statistics.mean(lengths):.1f} [{min(lengths)} .. {max(lengths)}] tokens"
        )
        if "methods_s" in more:
            each = ", ".join(f"{name} {seconds:.2f}" for name, seconds in more["methods_s"].items())
            text += f" (seconds: {each})"
        if "plain_s" in more:
            text += f" (plain transformers forward and backward: {more['plain_s']:.2f} s)"
        return text


@dataclass(frozen=True, kw_only=True)
class Round:
    """Every system once, or once in every setting."""

    flops: float
    """Operations a second in products of large matrices, on all cores, in the fastest type that is used."""
    runs: list[Ran]

    def ranked(self, algo: str, system: str) -> list[Ran]:
        """The runs of one system, the one of the most tokens/s first."""
        runs = [run for run in self.runs if (run.algo, run.setting.system) == (algo, system)]
        return sorted(runs, key=lambda run: -run.measured.tokens_per_s())


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


def measure(algo: str, setting: Setting, *, iterations: int, lengths: Lengths, seed: int = 0) -> Ran:
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
    ran = Ran(algo=algo, setting=setting, measured=Measured(**output))  # type: ignore[arg-type]  # as written
    print(ran.shown(), flush=True)
    return ran


def directory(lengths: Lengths) -> Path:
    """Of a workload."""
    return environments.RESULTS / ("workload" if lengths == "fixed" else f"workload-{lengths}")


def play(args: argparse.Namespace) -> list[Round]:
    """All rounds, each side in one setting."""
    chosen = choose(args)
    iterations = args.iterations or ITERATIONS[args.lengths]
    return [
        one_round(number, chosen, iterations=iterations, lengths=args.lengths)
        for number in range(1, args.rounds + 1)
    ]


def choose(args: argparse.Namespace) -> dict[tuple[str, str], list[Setting]]:
    """The setting of each side that was best in a trial of all; with `--quick` its first."""
    every = {side: settings(*side, args.dtypes) for side in itertools.product(args.algos, args.systems)}
    if args.quick:
        return {side: found[:1] for side, found in every.items()}
    trial = one_round(0, every, iterations=1, lengths=args.lengths)
    return {side: [run.setting for run in trial.ranked(*side)[:1]] for side in every}


def one_round(
    number: int, chosen: Mapping[tuple[str, str], list[Setting]], *, iterations: int, lengths: Lengths
) -> Round:
    """Run the settings that were chosen for each algorithm and system; the trial is round 0."""
    dtypes = {setting.dtype for found in chosen.values() for setting in found}
    flops = max(bound.matrix_rate(CORES, getattr(torch, dtype)) for dtype in dtypes)
    print(f"{f'round {number}' if number else 'trial'}: products {flops / 1e12:.3f} TFLOP/s", flush=True)
    runs = [
        measure(algo, setting, iterations=iterations, lengths=lengths, seed=number)
        for (algo, _), found in chosen.items()
        for setting in found
    ]
    return Round(flops=flops, runs=runs)


def compared(rounds: Sequence[Round], algo: str, lengths: Lengths) -> dict[str, dict[str, Spread]]:
    """Of each system that ran: tokens/s, share of the bound, and ours over its tokens/s."""
    found = {}
    for system in SYSTEMS:
        bests = [(each, ran) for each in rounds for ran in each.ranked(algo, system)[:1]]
        if not bests:
            continue
        rates = [ran.measured.tokens_per_s() for _, ran in bests]
        found[system] = {
            "tokens_per_s": spread(rates),
            "share_of_bound": spread([ran.share(lengths, each.flops) for each, ran in bests]),
        }
        own = [ran.measured.tokens_per_s() for each in rounds for ran in each.ranked(algo, "ours")[:1]]
        if system != "ours" and own:
            ratios = [mine / rate for mine, rate in zip(own, rates, strict=True)]
            found[system]["ours_over_it"] = spread(ratios)
    return found


def named(args: argparse.Namespace) -> list[str]:
    """Parts of the result's name: what is not as a rule."""
    lengths = [] if args.lengths == "fixed" else [args.lengths]
    return lengths + ([] if args.dtypes == ["float32"] else args.dtypes)


def main() -> None:
    """Measure in turns, print, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    rounds = play(args)
    found = {algo: compared(rounds, algo, args.lengths) for algo in args.algos}
    for algo, systems in found.items():
        for system, numbers in systems.items():
            ratio = f", ours over it {numbers['ours_over_it']}" if "ours_over_it" in numbers else ""
            share = numbers["share_of_bound"]
            print(f"{algo}, {system}: {numbers['tokens_per_s']} tokens/s, {share} of the bound{ratio}")
    result = {
        "machine": machine(),
        "lengths": args.lengths,
        "dtypes": args.dtypes,
        "rounds": [asdict(each) for each in rounds],
        "compared": {
            algo: {system: {n: one.as_dict() for n, one in ns.items()} for system, ns in systems.items()}
            for algo, systems in found.items()
        },
    }
    name = "-".join(["throughput", *named(args)])
    print(f"written: {environments.write_result(name, result)}")


if __name__ == "__main__":
    main()
