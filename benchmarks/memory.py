"""Peak memory of a PPO iteration beside what the memory model says, and whether memory grows over iterations.

    python -m benchmarks.memory
    python -m benchmarks.memory --rounds 1 --model tiny --iterations 20

Peak: a fresh device process runs PPO with an actor, a critic and a reference of 107 M parameters, and counts
its resident memory at most. What a process of modules and threads takes by itself, that of a model of 0.05 M
parameters less what is predicted for it, is subtracted. The bar is 1.15 times the prediction.

Growth: PPO of the embedded model; the resident memory of the controller and of each device after every
iteration, the least and the most of each half, and the slope of a straight line through the second half.
Pages of the object store, which all processes share and a process touches one after the other, are told
apart and not in the slope.
Beside it what the C library has given out and not got back: the rest it keeps for what comes next.

Writes results/memory.json and draws docs/images/memory.svg.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import Callback

from benchmarks import environments
from benchmarks.allocated import Weighed, allocated_bytes
from benchmarks.small_runs import alone, quiet_trainer, write_llama
from benchmarks.spread import machine, spread
from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.algos import PPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.mapping.machine import this_machine
from rlhf_lightning.mapping.observe import recipe, shape_of
from rlhf_lightning.mapping.plan import plan
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping_inputs import read_dataflow
from rlhf_lightning.spec import EMBEDDED, Sampling
from rlhf_lightning.strategies import Colocated
from rlhf_lightning.workers import Settings

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "memory.svg"
MODELS = {
    "100m": {"hidden": 768, "intermediate": 2048, "layers": 15, "heads": 12},
    "tiny": {"hidden": 64, "intermediate": 128, "layers": 1, "heads": 2},
}
BARE = "tiny"
"""Whose process shows what modules and threads take."""
ROWS, DIGITS, RESPONSE = 32, 57, 64
PROMPT = DIGITS + len("Sort : ")
"""Tokens: one a character."""
PEAK_ITERATIONS = 2
BAR = 1.15


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Of one device process."""

    measured_bytes: int
    """Resident at most, from the process's start to the end of its last iteration."""
    predicted_bytes: float
    """On the device in the fullest stage of an iteration."""


@dataclass(frozen=True, kw_only=True)
class Resident:
    """After every iteration."""

    iterations: list[int]
    """Their numbers, from 1."""
    mb: dict[str, list[float]]
    """Megabytes by process: `controller`, `device 0`, ..."""
    shared_mb: dict[str, list[float]]
    """Beside these, megabytes of the object store that the process has touched."""
    allocated_mb: dict[str, list[float]]
    """Of these, megabytes that the C library has given out, by process: `controller`, `rank 0`, ..."""


class Watch(Callback):
    """Notes what the processes of a run hold, and the peak of its devices."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.peak_bytes = 0
        self.iterations: list[int] = []
        self.mb: dict[str, list[float]] = {}
        self.shared_mb: dict[str, list[float]] = {}
        self.allocated_mb: dict[str, list[float]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        """Look; the peak is told by the calls themselves."""
        assert isinstance(pl_module, RLHFAlgorithm)
        self.peak_bytes = max(report.memory_bytes for report in pl_module.strategy.reports)
        self.iterations.append(trainer.global_step)
        pids = {"controller": os.getpid()}
        pids |= {f"device {i}": pid for i, pid in enumerate(sorted(devices(os.getpid())))}
        for name, pid in pids.items():
            own, shared = resident_mb(pid)
            self.mb.setdefault(name, []).append(own)
            self.shared_mb.setdefault(name, []).append(shared)
        actor = pl_module.main_actor
        assert isinstance(actor, Weighed)
        allocated = {f"rank {i}": size for i, size in enumerate(actor.allocated().fetch())}
        for name, size in {"controller": allocated_bytes(), **allocated}.items():
            self.allocated_mb.setdefault(name, []).append(size / 1e6)


def devices(parent: int) -> Iterator[int]:
    """The devices among the processes that `parent` started, directly or not."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended since
    for pid in parents:
        above: int | None = pid
        while above and above != parent:
            above = parents.get(above)
        if above and Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::DeviceActor"):
            yield pid


def resident_mb(pid: int) -> tuple[float, float]:
    """Of a process: its own pages and files, and pages that it shares with others."""
    kb = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.startswith("Rss"):
            kb[name] = int(rest.split()[0])
    return (kb["RssAnon"] + kb["RssFile"]) * 1024e-6, kb["RssShmem"] * 1024e-6


def algorithm(path: str) -> PPO:
    """PPO with fresh models of one size; a rule rewards."""
    return PPO(actor=Weighed(path=path, sampling=Sampling(max_new_tokens=RESPONSE)))


def train(ppo: PPO, folder: str, *, iterations: int, data: TaskData, devices: int) -> Watch:
    """Run in this process."""
    watch = Watch()
    trainer = quiet_trainer(Colocated(devices=devices), folder, steps=iterations, callbacks=[watch])
    trainer.fit(ppo, datamodule=data)
    return watch


def predicted_bytes(path: str) -> float:
    """What the mapping says of the fullest stage of an iteration on one device."""
    ppo = algorithm(path)
    roles = {name: role.following(ppo.actor) for name, role in ppo.roles().items()}
    ppo.bind(roles)
    flow = read_dataflow(ppo, ROWS)
    workload = replace(
        recipe(ppo.actor, Settings()), prompt=PROMPT, real_prompt=PROMPT, response=RESPONSE, batch=ROWS,
        mini_batches=1,
    )  # fmt: skip
    shapes = {role: shape_of(roles[role]) for role in flow.roles}
    allows = Settings().training.allows
    costs = SimulatedCosts(this_machine(1), flow, shapes, workload=workload, allows=allows)
    found = plan(costs, 1, sizes=[1], count=1)
    return max(task.memory_bytes for pool in found.mappings[0].pools for task in found.tasks(pool))


def peak(model: str) -> Peak:
    """Of one model, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_llama(Path(folder, "model"), **MODELS[model])
        data = TaskData(
            num_rows=ROWS * PEAK_ITERATIONS, num_val_rows=2, batch_size=ROWS, min_digits=DIGITS,
            max_digits=DIGITS,
        )  # fmt: skip
        watch = train(algorithm(path), folder, iterations=PEAK_ITERATIONS, data=data, devices=1)
        return Peak(measured_bytes=watch.peak_bytes, predicted_bytes=predicted_bytes(path))


def growth(iterations: int) -> Resident:
    """Of the embedded model on two devices, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        data = TaskData(num_rows=ROWS * iterations, num_val_rows=2, batch_size=ROWS)
        watch = train(algorithm(EMBEDDED), folder, iterations=iterations, data=data, devices=2)
    return Resident(
        iterations=watch.iterations,
        mb=watch.mb,
        shared_mb=watch.shared_mb,
        allocated_mb=watch.allocated_mb,
    )


def slope(iterations: Sequence[int], mb: Sequence[float]) -> tuple[float, float]:
    """MB in 100 iterations, and its standard error, by least squares through the second half."""
    half = len(mb) // 2
    x, y = np.array(iterations[half:], dtype=float), np.array(mb[half:])
    if len(x) < 3:
        raise ValueError(f"{len(mb)} iterations: too few for a slope. Try --iterations 6 or more.")
    (rate, start), spread_ = np.polyfit(x, y, 1), ((x - x.mean()) ** 2).sum()
    error = np.sqrt(((y - start - rate * x) ** 2).sum() / (len(x) - 2) / spread_)
    return 100 * float(rate), 100 * float(error)


def draw(found: Resident) -> None:
    """Growth since the first look, by iteration."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, mb in found.mb.items():
        axes.plot(found.iterations, mb, linewidth=1, label=name)
    axes.set(xlabel="iterations", ylabel="resident, MB", ylim=(0, None))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, metadata={"Date": None})


def peaks(model: str, rounds: int) -> dict[str, object]:
    """Measure the peak in turns with the bare process, and print it."""
    ratios, found = [], []
    for _ in range(rounds):
        large, bare = (Peak(**alone("memory", "--peak", name)) for name in (model, BARE))
        own = bare.measured_bytes - bare.predicted_bytes
        ratios.append((large.measured_bytes - own) / large.predicted_bytes)
        found.append({model: asdict(large), BARE: asdict(bare)})
        print(
            f"peak {large.measured_bytes / 1e6:,.0f} MB, the bare process {own / 1e6:,.0f} MB, predicted "
            f"{large.predicted_bytes / 1e6:,.0f} MB: {ratios[-1]:.2f} times that",
            flush=True,
        )
    print(f"peak over the prediction: {spread(ratios)}; the bar is {BAR}")
    return {"rounds": found, "ratio": spread(ratios).as_dict(), "bar": BAR}


def grown(iterations: int) -> dict[str, object]:
    """Measure the growth, print and draw it."""
    found = Resident(**alone("memory", "--growth", "--iterations", str(iterations)))
    slopes = {}
    held = {f"{name}, allocated": mb for name, mb in found.allocated_mb.items()}
    for name, mb in {**found.mb, **held}.items():
        rate, error = slopes[name] = slope(found.iterations, mb)
        halves = (f"{min(half):.1f} to {max(half):.1f}" for half in (mb[: len(mb) // 2], mb[len(mb) // 2 :]))
        print(f"{name:<24}{', then '.join(halves)} MB; {rate:+.2f} +- {error:.2f} MB in 100 iterations")
    draw(found)
    return {**asdict(found), "mb_in_100_iterations": slopes}


def main() -> None:
    """Measure, print, write and draw."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of the peak")
    parser.add_argument("--model", choices=tuple(MODELS), default="100m", help="of the peak")
    parser.add_argument("--iterations", type=int, default=100, help="of the growth")
    parser.add_argument("--peak", choices=tuple(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--growth", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(json.dumps(asdict(peak(args.peak))))
    elif args.growth:
        print(json.dumps(asdict(growth(args.iterations))))
    else:
        parts = {"peak": peaks(args.model, args.rounds), "growth": grown(args.iterations)}
        print(f"written: {environments.write_result('memory', {'machine': machine(), **parts})}")


if __name__ == "__main__":
    main()
