"""The simulators beside published measurements: the fit of the A100's efficiencies, its errors, the plots.

python -m benchmarks.mapping fit      the efficiencies that fit the calibration rows best
python -m benchmarks.mapping rows     measured against predicted
python -m benchmarks.mapping scaling  tokens/s of each placement by GPUs
python -m benchmarks.mapping plot     docs/images/mapping-*.svg
"""

import dataclasses
import math
from itertools import product
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import environments, published
from rlhf_lightning.mapping import fit, shapes
from rlhf_lightning.mapping.dataflow import Dataflow, Stage, Work
from rlhf_lightning.mapping.fit import Key
from rlhf_lightning.mapping.hardware import A100, Efficiency, Hardware
from rlhf_lightning.mapping.plan import plan
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import Generation, ParallelLayout

FREE: tuple[Key, ...] = (
    *(("efficiency", name) for name in ("matmul", "prefill_matmul", "decode_matmul", "attention")),
    *(("efficiency", name) for name in ("memory", "weights", "kv", "intra", "inter")),
    *(("overhead", name) for name in ("rows", "decode_layer", "decode_sequence")),
)
START = Efficiency(
    matmul=0.7, prefill_matmul=0.8, decode_matmul=0.7, attention=0.4, memory=0.8, weights=0.9, kv=0.8,
    intra=0.77, inter=0.8,
)  # fmt: skip
"""Where the fit begins, and what it stays near to where no row says otherwise: usual shares of a peak."""
CEILINGS = {"intra": 0.85, "inter": 0.9, "memory": 0.9} | dict.fromkeys(
    ("matmul", "prefill_matmul", "decode_matmul", "attention", "weights", "kv"), 0.95
)
"""What programs do not exceed, of the nominal rates of links, memory and products."""

DEVICES = (16, 24, 32, 48, 64, 96, 128, 192, 256)
SCORED = ("critic", "reference", "reward")
PPO = Dataflow(
    (
        Stage("generation", (Work("actor", "generate", 1024, 1),)),
        Stage("preparation", tuple(Work(role, "infer", 1024, 1) for role in SCORED)),
        Stage("training", tuple(Work(role, "train", 1024, 8) for role in ("critic", "actor"))),
    )
)
PLACEMENTS = {
    "colocated": (("actor", "critic", "reference", "reward"),),
    "split": (("actor", "reference"), ("critic", "reward")),
    "standalone": (("actor",), ("critic",), ("reference",), ("reward",)),
}


def loss(cluster: Hardware) -> float:
    """Squared logarithms of the errors: a row counts once, a curve as its coefficients."""
    total = 0.0
    for rows, weight in (
        (published.megatron, 3), (published.hybridflow, 2), (published.prefill, 3), (published.decode, 4),
    ):  # fmt: skip
        errors = [math.log1p(row.error) ** 2 for row in rows(cluster)]
        total += weight * sum(errors) / len(errors)
    return total


def table(cluster: Hardware) -> None:
    """Print the rows."""
    for row in published.rows(cluster):
        numbers = f"{row.measured:9.1f} {row.predicted:9.1f} {row.unit:14s} {100 * row.error:+6.1f}%"
        print(f"{row.name:36s} {numbers}")


def ppo(model: str, devices: int, workload: Workload) -> tuple[float, dict[str, float]]:
    """Tokens per second of PPO: the best mapping, and given placements (0: does not fit)."""
    actor = shapes.load(model)
    critic = actor.with_head("scalar")
    sizes = {"actor": actor, "reference": actor, "critic": critic, "reward": critic}
    costs = SimulatedCosts(A100, PPO, sizes, workload=workload)
    try:
        found = plan(costs, devices, baselines=PLACEMENTS)
    except ValueError:
        return 0.0, dict.fromkeys(PLACEMENTS, 0.0)
    speeds = {name: found.tokens_per_s(m) if m else 0.0 for name, m in found.baselines.items()}
    return found.tokens_per_s(found.mappings[0]), speeds


def scaling() -> None:
    """Print placements by devices, for three sizes of a micro-batch."""
    for tokens, model, devices in product((2048, 8192, 16384), ("llama-13b", "llama-34b"), DEVICES):
        best, speeds = ppo(model, devices, Workload(micro_batch_tokens=tokens))
        numbers = "  ".join(f"{name} {value:7.0f}" for name, value in speeds.items())
        print(f"{tokens:6d} {model} {devices:4d}  best {best:7.0f}  {numbers}")


def plot(directory: Path) -> None:
    """Write the pictures of docs/simulators.md."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, draw in (("rows", draw_rows), ("generation", draw_generation), ("placements", draw_placements)):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        draw(figure)
        figure.savefig(directory / f"mapping-{name}.svg", metadata={"Date": None})


def draw_rows(figure: Figure) -> None:
    """Error of each calibration row."""
    axes = figure.subplots()
    rows = published.rows(A100)
    axes.bar(range(len(rows)), [100 * row.error for row in rows], color=[_colour(row.name) for row in rows])
    axes.set_xticks(
        range(len(rows)), [row.name.replace(", training", "") for row in rows], rotation=90, size=6
    )
    axes.axhline(0, color="black", lw=0.5)
    axes.set_ylabel("prediction error, %")


def _colour(name: str) -> str:
    kinds = {"Mega": "tab:blue", "Hybr": "tab:red", "OPT-": "tab:green"}
    return kinds[name[:4]] if "prefill" not in name else "tab:olive"


def draw_generation(figure: Figure) -> None:
    """Seconds of a generation by what they are spent on, for each tg."""
    kinds = ("memory bandwidth", "compute", "intra-node network", "per-step overhead")
    for axes, model in zip(figure.subplots(1, 2), ("llama-7b", "llama-13b"), strict=True):
        bottom = [0.0] * 4
        every = [
            published.colocated_generation(
                A100, model, ParallelLayout(1, 8, 2, generation=Generation(1, tg))
            )[0]
            for tg in (8, 4, 2, 1)
        ]
        for kind in kinds:
            heights = [estimate.parts.get(kind, 0.0) for estimate in every]
            axes.bar(["8", "4", "2", "1"], heights, bottom=bottom, label=kind)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axes.set(title=f"{model}, 16 GPUs, training 1-8-2", xlabel="tg", ylabel="s", ylim=(0, 130))
        for place, height in enumerate(bottom):
            axes.text(place, min(height, 122), f"{height:.0f}", ha="center", va="bottom")
    axes.legend(fontsize=7)


def draw_placements(figure: Figure) -> None:
    """Throughput of the placements against devices."""
    for axes, model in zip(figure.subplots(1, 2), ("llama-13b", "llama-34b"), strict=True):
        every = [ppo(model, devices, Workload()) for devices in DEVICES]
        for name in PLACEMENTS:
            speeds = [speeds[name] / best if best else math.nan for best, speeds in every]
            axes.plot(DEVICES, [speed or math.nan for speed in speeds], marker="o", label=name)
        axes.set(title=f"PPO, four {model}", xlabel="A100s", ylabel="throughput / that of the best mapping")
    axes.legend(fontsize=7)


def main() -> None:
    """Run one command."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("command", choices=("fit", "rows", "scaling", "plot"))
    command = parser.parse_args().command
    if command == "fit":
        start = dataclasses.replace(A100, efficiency=START)
        fitted = fit.fit(start, loss, FREE, ceilings=CEILINGS, tie=0.01)
        for key in FREE:
            print(f"{'.'.join(key)} = {fit.get(fitted, key):.3g}")
        table(fitted)
    elif command == "rows":
        table(A100)
    elif command == "scaling":
        scaling()
    else:
        plot(Path("docs/images"))


if __name__ == "__main__":
    main()
