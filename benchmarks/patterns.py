"""The execution patterns of the field side by side: PPO on this machine, seconds, bytes, memory, idle share.

    python -m benchmarks.patterns                          the embedded model and one of 100 M parameters
    python -m benchmarks.patterns --models embedded --only openrlhf --iterations 3

Each run is a process of its own. Prints a table, writes results/patterns.json, and draws who ran when in an
iteration as docs/images/patterns/<model>-<pattern>.svg. Iterations after the first count.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from benchmarks import environments
from benchmarks.small_runs import alone, quiet_trainer, write_llama
from benchmarks.spread import machine
from benchmarks.timeline import draw_timeline, idle_shares
from rlhf_lightning.algos import PPO
from rlhf_lightning.callbacks import Trace
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import Transition
from rlhf_lightning.parallel import Generation, Moved
from rlhf_lightning.reporting import timings
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import (
    Colocated,
    DeepSpeedChat,
    HybridEngine3D,
    NeMoAligner,
    OneStepOff,
    OpenRLHF,
    Pipelined,
    Split,
    Standalone,
)
from rlhf_lightning.strategies.hybrid3d import Parallel3D, Sizes
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Critic

PICTURES = Path(__file__).parent.parent / "docs" / "images" / "patterns"
PATTERNS: Mapping[str, Callable[[], Strategy]] = {
    "colocated": lambda: Colocated(devices=2),
    "one-cluster": lambda: Colocated(devices=2, offload=True),
    "two-cluster": lambda: Split(devices=2, offload=True),
    "deepspeed-chat": lambda: DeepSpeedChat(devices=2),
    "nemo-aligner": lambda: NeMoAligner(parallel=Sizes(t=2)),
    "openrlhf": OpenRLHF,
    "pipelined": Pipelined,
    "one-step-off": OneStepOff,
    "standalone": Standalone,
    "hybrid3d": lambda: HybridEngine3D(parallel=Parallel3D(t=2, generate=Generation(1, 1)), devices=2),
}
"""The least devices that show each: the processes share this machine's cores."""
ROWS, RESPONSE = 16, 32


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One pattern on one model."""

    devices: int
    step_s: float
    """Median of the iterations after the first."""
    phases_s: dict[str, float]
    """By role and method, the slowest device of each iteration: medians."""
    moved_bytes: int
    """Parameters that went from device to device in an iteration to generate with."""
    memory_bytes: int
    """Peak resident memory of the fullest device's process."""
    idle: float
    """Mean share of the time in which a device ran no call."""


class Transitions(Callback):
    """Asks the actor after each iteration what its way to generation took."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.received_bytes = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        """Of the last one."""
        assert isinstance(pl_module, PPO)
        found: list[Transition] = pl_module.actor.transition().fetch()
        self.received_bytes = sum(each.received_bytes for each in found)


def write_model(name: str, directory: Path) -> str:
    """The path of a model: the embedded one, or a Llama of 107 M parameters, initialised at the load."""
    if name == "embedded":
        return name
    return write_llama(directory, hidden=768, intermediate=2048, layers=15, heads=12)


def play(pattern: str, model: str, iterations: int) -> Measured:
    """Run one pattern in this process, and draw its last iteration."""
    trace, transitions = Trace(), Transitions()
    strategy = PATTERNS[pattern]()
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(model, Path(folder))
        algorithm = PPO(
            actor=Actor(path=path, sampling=Sampling(max_new_tokens=RESPONSE)),
            critic=Critic(),
            mini_batch_size=8,
        )
        trainer = quiet_trainer(strategy, folder, steps=iterations, callbacks=[trace, transitions])
        trace.path = Path(folder) / "trace.json"
        data = TaskData(num_rows=ROWS * iterations, num_val_rows=2, batch_size=ROWS)
        trainer.fit(algorithm, datamodule=data)
    return measured(trace, transitions.received_bytes, picture=PICTURES / f"{model}-{pattern}.svg")


def measured(trace: Trace, received_bytes: int, *, picture: Path) -> Measured:
    """The numbers of a run; its last iteration is drawn."""
    kept = trace.iterations[1:]
    last, _ = kept[-1]
    draw_timeline(picture, [c for c in trace.calls if c.started_s >= last and c.method != "transition"])
    phases: defaultdict[str, list[float]] = defaultdict(list)
    sent = 0
    for started, seconds in kept:
        inside = [c for c in trace.calls if started <= c.started_s < started + seconds]
        for name, spent in timings(inside).items():
            if name.startswith("time/"):
                phases[name.removeprefix("time/").removesuffix("_s")].append(spent)
        sent = sum(call.value.sent_bytes for call in inside if isinstance(call.value, Moved))
    idle = idle_shares(trace.calls, kept)
    return Measured(
        devices=len(idle),
        step_s=statistics.median(seconds for _, seconds in kept),
        phases_s={name: statistics.median(values) for name, values in phases.items()},
        moved_bytes=sent + received_bytes,
        memory_bytes=max(call.memory_bytes for call in trace.calls),
        idle=statistics.mean(idle.values()),
    )


def run(pattern: str, model: str, iterations: int) -> Measured:
    """Play a pattern in a process of its own."""
    words = ["--only", pattern, "--models", model, "--iterations", str(iterations), "--here"]
    return Measured(**alone("patterns", *words))


def shown(pattern: str, one: Measured) -> str:
    """A row of the table."""
    longest = sorted(one.phases_s.items(), key=lambda item: -item[1])[:3]
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest)
    numbers = (
        f"{one.devices:>8}{one.step_s:>9.2f}{one.moved_bytes / 1e6:>10.1f}{one.memory_bytes / 1e6:>10.0f}"
    )
    return f"{pattern:<16}{numbers}{one.idle:>7.0%}   {phases}"


def main() -> None:
    """Run every pattern on every model, print, and write the result."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["embedded", "100m"], choices=["embedded", "100m"])
    parser.add_argument("--only", nargs="+", default=list(PATTERNS), choices=list(PATTERNS))
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(asdict(play(args.only[0], args.models[0], args.iterations))))
        return
    results: dict[str, dict[str, object]] = {}
    for model in args.models:
        columns = f"{'devices':>8}{'step, s':>9}{'moved, MB':>10}{'peak, MB':>10}{'idle':>7}"
        print(f"\n{model:<16}{columns}   longest phases, s")
        for pattern in args.only:
            one = run(pattern, model, args.iterations)
            print(shown(pattern, one), flush=True)
            results.setdefault(model, {})[pattern] = asdict(one)
    result = {"machine": machine(), "rows": ROWS, "response": RESPONSE, "models": results}
    print(f"\nwritten: {environments.write_result('patterns', result)}")


if __name__ == "__main__":
    main()
