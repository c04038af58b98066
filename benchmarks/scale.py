"""What the controller costs by the number of workers: seven calls of PPO, to workers that only answer.

    python -m benchmarks.scale                     up to 1,024 workers in this process, up to 64 Ray actors
    python -m benchmarks.scale --workers 16 64 --actors 0

In this process a call is split, its message is packed, the report of every worker is unpacked, and nothing
else happens: that is the controller's own work, in seconds of a core. The actors are real, import no torch
and answer at once: that is Ray's part. Prints medians, ranges and the line through the medians, writes
results/scale.json, draws docs/images/scale.svg.
"""

import gc
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import ray
import torch

from benchmarks import environments
from benchmarks.spread import Spread, machine, spread
from rlhf_lightning.controller import Batch, WorkerGroup
from rlhf_lightning.controller.block import Block
from rlhf_lightning.controller.call import Call, CallReport
from rlhf_lightning.controller.parcel import Packer, Parcel, ShardColumn, opened
from rlhf_lightning.controller.ray_transport import RayTransport
from rlhf_lightning.controller.ray_types import DeviceHandle
from rlhf_lightning.controller.transport import Future, Submitted, Transport
from rlhf_lightning.functional import GAEEstimator, PolicyLoss, ValueLoss
from rlhf_lightning.garbage import collect_rarely
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.workers import Actor, Critic, Reference, Reward

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "scale.svg"
ROWS, PROMPT = 4096, 1024
"""Of a batch; responses stay with the workers, so their length costs the controller nothing."""
ROUNDS = 5
NUMBERS = {f"actor/number_{index}": float(index) for index in range(10)}
REPORT = pickle.dumps(CallReport("actor", "update_actor", 0, 0.0, 0.0, 0, NUMBERS))
"""What every worker says of every call."""


@dataclass(frozen=True, eq=False)
class Answer(Future):
    """A value that a worker would have."""

    call: int
    column: str
    transport: Transport


class Answering(Transport):
    """Any number of workers that answer every call at once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.sent_bytes = 0
        self._packer = Packer()
        self._shared: WeakKeyDictionary[Block, Answer] = WeakKeyDictionary()

    def submit(self, device: int, call: Call, blocks: Sequence[Future | Block]) -> Submitted:
        """Pack the call as for Ray."""
        shards: dict[int, int] = {}
        sources: list[ShardColumn | Block] = []
        for block in blocks:
            if isinstance(block, Answer):
                sources.append((shards.setdefault(block.call, len(shards)), block.column))
            elif isinstance(block, Block):
                sources.append(block)
        parcel = Parcel(call, tuple(sources), (call.returns,) if call.returns else ())
        self.sent_bytes += len(self._packer.packed(parcel))
        self.calls += 1
        made = {name: Answer(self.calls, name, self) for name in call.returns}
        return Submitted(Answer(self.calls, "", self), dict(made))

    def fetch(self, futures: Sequence[Future]) -> list[object]:
        """The reports."""
        return [opened(REPORT) for _ in futures]

    def shared(self, block: Block) -> Future:
        """Pretend to store it, once."""
        if block not in self._shared:
            self.calls += 1
            self._shared[block] = Answer(self.calls, "shared", self)
        return self._shared[block]

    def drain(self) -> list[CallReport]:
        """None is kept."""
        return []

    def close(self) -> None:
        """Nothing runs."""


class Quick:
    """A Ray actor that answers without a look at what it was asked."""

    def submit(self, packed: bytes, *shards: object) -> object:
        """An empty shard where columns were asked for, and the report."""
        return REPORT if b"update_" in packed else ({}, REPORT)


class Node:
    """Owner of the actors: this machine."""

    spans_nodes = False

    def __init__(self, actors: list[DeviceHandle]) -> None:
        self.actors = actors
        self.labels = [f"device {rank}" for rank in range(len(actors))]

    def close(self) -> None:
        """They end with Ray."""


def iteration(transport: Transport, workers: int, batch: Batch) -> None:
    """The seven calls of PPO, and the metrics."""
    layout, ranks = ParallelLayout(d=workers), tuple(range(workers))

    def group(name: str) -> WorkerGroup:
        return WorkerGroup(name, transport, layout, ranks)

    actor, critic = Actor().bound(group("actor")), Critic().bound(group("critic"))
    reference, reward = Reference().bound(group("reference")), Reward().bound(group("reward"))
    batch |= actor.generate_sequences(batch)
    batch |= critic.compute_values(batch)
    batch |= reference.compute_ref_log_prob(batch)
    batch |= reward.compute_reward(batch)
    batch |= actor.compute_advantage(batch, estimator=GAEEstimator())
    metrics = critic.update_critic(batch, loss=ValueLoss())
    metrics |= actor.update_actor(batch, loss=PolicyLoss())
    metrics.fetch()


def timed(run: Callable[[], None], clock: Callable[[], float]) -> Spread:
    """Seconds of one run by a clock."""
    seconds = []
    for _ in range(ROUNDS + 1):
        gc.collect()
        started = clock()
        run()
        seconds.append(clock() - started)
    return spread(seconds[1:])


def prompts() -> Batch:
    """Rows as a data loader gives them."""
    return Batch.of(
        {
            "prompt_ids": torch.zeros(ROWS, PROMPT, dtype=torch.int64),
            "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.bool),
            "row_ids": torch.arange(ROWS),
            "rows": [{"data_source": "task"}] * ROWS,
        }
    )


def in_process(workers: int, batch: Batch) -> Spread:
    """Seconds of a core that the controller works."""
    return timed(lambda: iteration(Answering(), workers, batch), time.process_time)


def over_ray(workers: int, batch: Batch) -> Spread:
    """Seconds of an iteration with real actors."""
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        actors = [ray.remote(Quick).remote() for _ in range(workers)]
        ray.get([actor.submit.remote(b"update_") for actor in actors])
        transport = RayTransport(Node(actors), timeout_s=600)

        def run() -> None:
            iteration(transport, workers, batch)
            transport.drain()

        return timed(run, time.perf_counter)
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class Line:
    """The straight line through the medians."""

    fixed_s: float
    per_worker_s: float
    furthest: float
    """Largest distance of a median from the line, as a share of the largest median."""


def line(found: dict[int, Spread]) -> Line:
    """By least squares."""
    workers, seconds = np.array(list(found)), np.array([each.median for each in found.values()])
    slope, start = np.polyfit(workers, seconds, 1)
    away = np.abs(seconds - (start + slope * workers)).max() / seconds.max()
    return Line(fixed_s=float(start), per_worker_s=float(slope), furthest=float(away))


def draw(found: dict[str, dict[int, Spread]]) -> None:
    """Median seconds by workers."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, seconds in found.items():
        axes.plot(list(seconds), [each.median for each in seconds.values()], marker="o", label=name)
    axes.set(xlabel="workers", ylabel="seconds an iteration", ylim=(0, None))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Measure, print, write and draw."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 128, 256, 512, 768, 1024])
    parser.add_argument("--actors", type=int, nargs="+", default=[4, 16, 32, 64])
    args = parser.parse_args()
    batch = prompts()
    collect_rarely()  # as a strategy does
    found: dict[str, dict[int, Spread]] = {"controller alone": {}, "with Ray": {}}
    kinds = (("controller alone", in_process, args.workers), ("with Ray", over_ray, args.actors))
    for name, measure, numbers in kinds:
        for workers in filter(None, numbers):
            found[name][workers] = one = measure(workers, batch)
            between = f"[{one.low:.3f} .. {one.high:.3f}]"
            print(f"{name:<17}{workers:>6} workers {one.median:8.3f} s {between}", flush=True)
    lines = {name: line(seconds) for name, seconds in found.items() if len(seconds) > 2}
    for name, each in lines.items():
        print(f"{name}: {each.fixed_s * 1e3:.1f} ms + {each.per_worker_s * 1e3:.3f} ms a worker, "
              f"furthest point {each.furthest:.0%} away")  # fmt: skip
    draw(found)
    result = {
        "machine": machine(),
        "rows": ROWS,
        "seconds": {
            name: {n: one.as_dict() for n, one in seconds.items()} for name, seconds in found.items()
        },
        "lines": {name: asdict(each) for name, each in lines.items()},
    }
    print(f"written: {environments.write_result('scale', result)}")


if __name__ == "__main__":
    main()
