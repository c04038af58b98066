"""Does every online algorithm learn? The embedded model sorts digits, several seeds, beside the start.

    python -m benchmarks.learning                            all algorithms; draws docs/images/learning*.svg
    python -m benchmarks.learning --algos PPO --fault sign   what a broken advantage does to one

Prints a table, and ends with exit code 1 where an algorithm does not improve by 5 standard errors, or where
SafeRLHF does not keep the cost under its threshold on every seed while PPO breaks it.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from benchmarks import environments
from benchmarks.learning_runs import ENTRIES, THRESHOLD, Result, Run, play
from rlhf_lightning.callbacks.reward_curve import running_mean

RESULTS = Path(__file__).parent / "results" / "learning.json"
PICTURES = Path(__file__).parent.parent / "docs" / "images"
STANDARD_ERRORS = 5
UNLIMITED = "PPO without a limit"
TEMPTED = ("SafeRLHF", UNLIMITED)
"""They have another reward, so their curves stand apart."""
WINDOW = 10
"""Iterations over which a curve is smoothed, and read at its end."""


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def verdict(name: str, results: Sequence[Result]) -> str:
    """What is wrong with an algorithm's results; nothing where empty."""
    gains = [r.final_reward - r.start_reward for r in results]
    error = spread(gains) / len(gains) ** 0.5
    if fmean(gains) <= STANDARD_ERRORS * error or fmean(gains) <= 0:
        return f"gains {fmean(gains):+.3f} with a standard error of {error:.3f}"
    over = [fmean(r.costs[-WINDOW:]) for r in results if r.costs]
    if name == "SafeRLHF" and max(over) > THRESHOLD:
        return f"its cost is {max(over):.3f} on a seed, above {THRESHOLD}"
    if name == UNLIMITED and min(r.final_cost for r in results) <= THRESHOLD:
        return f"it keeps the threshold {THRESHOLD} by itself, so SafeRLHF has nothing to do"
    return ""


def table(every: Mapping[str, Sequence[Result]]) -> list[str]:
    """The rows to print."""
    lines = [f"{'algorithm':<22}{'start':>8}{'final':>8}{'spread':>8}{'gain/SE':>9}{'KL':>8}{'cost':>8}"]
    for name, results in every.items():
        gains = [r.final_reward - r.start_reward for r in results]
        error = spread(gains) / len(gains) ** 0.5
        start, final = [r.start_reward for r in results], [r.final_reward for r in results]
        lines.append(
            f"{name:<22}{fmean(start):>8.3f}{fmean(final):>8.3f}{spread(final):>8.3f}"
            f"{fmean(gains) / error if error else float('inf'):>9.1f}{fmean([r.kl for r in results]):>8.3f}"
            f"{fmean([r.final_cost for r in results]):>8.3f}"
        )
    return lines


def curve_picture(name: str, curves: Mapping[str, Sequence[Sequence[float]]], *, label: str) -> None:
    """Running means of one or more runs a curve, and the range of the runs, as docs/images/<name>.svg."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for title, runs in curves.items():
        columns = list(zip(*(smooth(run) for run in runs), strict=True))
        steps = range(1, len(columns) + 1)
        axes.plot(steps, [fmean(c) for c in columns], label=title)
        if len(runs) > 1:
            axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], alpha=0.2)
    axes.set_xlabel("iterations")
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})


def draw(every: Mapping[str, Sequence[Result]]) -> None:
    """All curves in one picture, and each in its own."""
    figure = Figure(figsize=(10, 10), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(2, 1))
    for number, (name, results) in enumerate(every.items()):
        columns = list(zip(*(smooth(r.rewards) for r in results), strict=True))
        style = ("-", "--", ":")[number // 7 % 3]
        if name not in TEMPTED:
            upper.plot(range(1, len(columns) + 1), [fmean(c) for c in columns], style, label=name)
        curve_picture(
            f"learning-{file_name(name)}", {name: [r.rewards for r in results]}, label="mean reward"
        )
    upper.set_ylabel(f"mean reward of {len(results)} seeds (running mean of {WINDOW} iterations)")
    upper.legend(ncols=2, fontsize="small")
    for number, result in enumerate(every.get("SafeRLHF", ())):
        steps = range(1, len(result.costs) + 1)
        words = ("mean cost", "multiplier / 2") if number == 0 else (None, None)
        lower.plot(steps, smooth(result.costs), color="C3", label=words[0])
        lower.plot(steps, [m / 2 for m in result.multipliers], ":", color="C0", label=words[1])
    lower.axhline(THRESHOLD, color="black", linewidth=0.8, label="threshold")
    lower.set_ylabel("SafeRLHF")
    lower.set_xlabel("iterations")
    lower.legend(fontsize="small")
    for axes in (upper, lower):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(PICTURES / "learning.svg", metadata={"Date": None})


def file_name(name: str) -> str:
    """As `--algo` has it: lower case, without signs."""
    return name.lower().replace("reinforce++", "reinforcepp").replace(".", "").replace(" ", "-")


def smooth(values: Sequence[float]) -> list[float]:
    """Running mean over the last iterations."""
    return running_mean(values, WINDOW)


def kept(every: Mapping[str, Sequence[Result]]) -> dict[str, list[Result]]:
    """These results among those of earlier runs, in the order of the entries; all are written down again."""
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found = {name: [Result(**result) for result in results] for name, results in earlier.items()}
    found |= {name: list(results) for name, results in every.items()}
    ordered = {name: found[name] for name in ENTRIES if name in found}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({n: [asdict(r) for r in rs] for n, rs in ordered.items()}) + "\n")
    return ordered


def main() -> None:
    """Run, print, draw."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--algos", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--fault", choices=("sign", "shift", "mask"), default="")
    args = parser.parse_args()
    runs = [Run(name=n, seed=s, fault=args.fault) for n in args.algos for s in range(args.seeds)]
    every: dict[str, list[Result]] = {name: [] for name in args.algos}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        for run, result in zip(runs, pool.map(play, runs), strict=True):
            every[run.name].append(result)
            print(
                f"{run.name} seed {run.seed}: {result.start_reward:.3f} -> {result.final_reward:.3f}",
                flush=True,
            )
    print("\n".join(table(every)))
    wrong = {name: said for name, results in every.items() if (said := verdict(name, results))}
    print("\n".join(f"NOT LEARNED: {name}: {said}" for name, said in wrong.items()) or "all learned")
    if not args.fault:
        draw(kept(every))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
