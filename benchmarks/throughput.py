"""Whole GRPO and PPO iterations beside TRL's GRPOTrainer and PPOTrainer, in turns in the same run.

    python benchmarks/throughput.py --rounds 3

Every trainer runs the workload of workload.py (prompt 64, response 128, 64 sequences, Llama of hidden 256 x 4
layers, vocabulary 4,096, fp32, rule reward) with one epoch and one update an iteration. Each round takes the
best of each side: TRL's over one and two processes and one or four micro-batches, ours over one and two
devices. Prints tokens/s and ours over TRL's with the spread over the rounds; writes results/throughput.json.
"""

import argparse
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import environments
import workload
from iterations import ALGORITHMS, Seconds
from spread import machine, spread

CORES = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How one system runs."""

    system: str
    """"trl" or "ours"."""

    processes: int
    """Processes (devices), which share the cores."""

    micro_batches: int = 1
    """Micro-batches of an update (TRL's are set by hand)."""

    def __str__(self) -> str:
        """For the printed lines."""
        return f"{self.system}, {self.processes} process(es), {self.micro_batches} micro-batch(es)"


SETTINGS = {
    "trl": [
        Setting(system="trl", processes=p, micro_batches=m) for p, m in itertools.product((1, 2), (1, 4))
    ],
    "ours": [Setting(system="ours", processes=p) for p in (1, 2)],
}


def measure(algo: str, setting: Setting, *, iterations: int, data: Path) -> dict[str, object]:
    """Run one setting in processes of its own; its tokens/s and the seconds behind it."""
    peer = setting.system == "trl"
    script = f"peers/trl_{algo}.py" if peer else "ours_throughput.py"
    given = {
        "algo": algo,
        "workload": data,
        "processes": setting.processes,
        "iterations": iterations,
        "micro_batches": setting.micro_batches,
    }
    output = environments.run(
        environments.python(f"trl-{algo}") if peer else Path(sys.executable),
        environments.HERE / script,
        [part for name, value in given.items() for part in environments.option(name, value)],
        processes=setting.processes if peer else 1,
        threads=CORES // setting.processes,
    )
    rate = Seconds(iterations=output["seconds"]).tokens_per_s()  # type: ignore[arg-type]  # a list of numbers
    print(f"  {algo}, {setting}: {rate:.0f} tokens/s{_parts(output)}", flush=True)
    return {"algo": algo, **vars(setting), **output, "tokens_per_s": rate}


def _parts(output: dict[str, object]) -> str:
    """Seconds by method, and of plain transformers over the same tokens, where a run tells them."""
    methods = output.get("methods_s")
    if not isinstance(methods, dict):
        return ""
    each = ", ".join(f"{name} {seconds:.2f}" for name, seconds in methods.items())
    return f" (seconds: {each}; plain transformers forward and backward {output['plain_s']:.2f})"


def best(runs: list[dict[str, object]], algo: str, system: str) -> float:
    """The best tokens/s of one system in one round."""
    return max(
        float(str(run["tokens_per_s"])) for run in runs if (run["algo"], run["system"]) == (algo, system)
    )


def main() -> None:
    """Measure in turns, print, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--iterations", type=int, default=4, help="timed iterations of each run, after one that is not"
    )
    parser.add_argument("--algos", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--peers_only", action="store_true", help="TRL alone, without a comparison")
    args = parser.parse_args()
    data = environments.RESULTS / "workload"
    workload.write(data)
    systems = ("trl",) if args.peers_only else ("trl", "ours")
    rounds: list[list[dict[str, object]]] = []
    for number in range(args.rounds):
        print(f"round {number + 1}", flush=True)
        settings = list(
            itertools.product(args.algos, [setting for system in systems for setting in SETTINGS[system]])
        )
        rounds.append([measure(algo, one, iterations=args.iterations, data=data) for algo, one in settings])
    result: dict[str, object] = {"machine": machine(), "rounds": rounds}
    for algo, system in itertools.product(args.algos, systems):
        print(f"{algo}, {system}, tokens/s: {spread([best(runs, algo, system) for runs in rounds])}")
    if not args.peers_only:
        ratios = {
            algo: spread([best(r, algo, "ours") / best(r, algo, "trl") for r in rounds])
            for algo in args.algos
        }
        for algo, ratio in ratios.items():
            print(f"ours / trl, {algo}: {ratio}")
        result["ratios"] = {algo: ratio.as_dict() for algo, ratio in ratios.items()}
    print(f"written: {environments.write_result('throughput', result)}")


if __name__ == "__main__":
    main()
