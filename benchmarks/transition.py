"""The actor's way from training to generation: HybridFlow's, HybridFlow-V's and DeepSpeed-Chat's, in turns.

    python benchmarks/transition.py                    4 processes, gloo
    python benchmarks/transition.py --device cuda      NCCL, one process a GPU

Prints for each pair of layouts, of the rank with the most, what it receives, its generation shard, what it
holds twice, its peak of memory for parameters and buffers, and the time of a transition there and back with
that of the others over ours. Writes results/transition.json. Peaks are taken in processes of their own: on
the CPU from the resident pages (gloo's buffers are in it), on a GPU from torch's allocator.
"""

import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import environments
import torch
import torch.distributed as dist
from gathering import DeepSpeedChat, HybridFlow, HybridFlowV, Rank, Transition
from spread import machine, spread
from transformers import LlamaConfig

from rlhf_lightning.engines.conversion import Conversion
from rlhf_lightning.parallel import Generation, ParallelLayout, Sharded, even_stages
from rlhf_lightning.parallel.transition import storage_bytes

_M_MMAP_THRESHOLD = -3
"""From malloc.h."""
LAYOUTS = ("1,4,1:1,2", "2,2,1:1,2", "1,2,2:1,1", "2,2,1:1,1")
SYSTEMS: Mapping[str, type[Transition]] = {
    "hybridflow": HybridFlow,
    "hybridflow-v": HybridFlowV,
    "deepspeed-chat": DeepSpeedChat,
}


@dataclass(frozen=True, kw_only=True)
class Actor:
    """A Llama of 110 M parameters, in float32."""

    hidden: int = 768
    """Hidden size."""
    layers: int = 12
    """Layers."""
    vocabulary: int = 16384
    """Tokens."""

    @property
    def params(self) -> list[Sharded]:
        """All parameters."""
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=round(self.hidden * 8 / 3 / 64) * 64,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            vocab_size=self.vocabulary,
        )
        return Conversion(config).parameters


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one set of processes measures."""

    actor: Actor
    """The model."""
    layout: ParallelLayout
    """Training and generation."""
    rounds: int
    """Timed transitions of each system, after one that is not; 0: for the peaks on a CPU."""
    device: str
    """cpu or cuda."""

    def rank(self, rank: int) -> Rank:
        """One of its ranks."""
        stages = even_stages(self.actor.layers, self.layout.p)
        device = torch.device(self.device, rank) if self.device == "cuda" else torch.device("cpu")
        return Rank(self.actor.params, stages, self.layout, rank, device)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One system; the most of all ranks."""

    received_bytes: int
    """Received for one transition."""
    shard_bytes: int
    """The generation shard."""
    twice_bytes: int
    """Trained parameters in memory of their own while it generates."""
    peak_bytes: int
    """Parameters and buffers within a transition, over all."""
    seconds: list[float]
    """There and back, of each round."""


class Memory:
    """The peak of this process over what it held at first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is resident now
            self._start = _status_bytes("VmRSS")

    def risen_bytes(self) -> int:
        """How much the peak is above the start."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._start
        return _status_bytes("VmHWM") - self._start


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _give_back_at_once() -> None:
    """Let the C library put every tensor into pages of its own, which are given back when it is freed."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)


def transition_s(way: Transition, device: torch.device) -> float:
    """Seconds of one transition there and back, from when all ranks are ready."""
    dist.barrier()
    start = time.perf_counter()
    way.gather()
    way.release()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def checked(way: Transition, device: torch.device) -> dict[str, int]:
    """Bytes of the first transition, whose values must be right."""
    training_bytes = storage_bytes(way.trained)
    memory = Memory(device)
    shard = way.gather()
    shard_bytes = storage_bytes(shard.values())
    twice_bytes = storage_bytes([*shard.values(), *way.trained]) - shard_bytes
    peak_bytes = training_bytes + memory.risen_bytes()
    expected = way.expected()
    wrong = [name for name, value in expected.items() if not torch.equal(shard[name], value)]
    if wrong or shard.keys() != expected.keys():
        raise RuntimeError(f"{type(way).__name__}: {wrong or shard.keys() ^ expected.keys()} is wrong")
    del shard
    way.release()
    return {
        "received_bytes": way.received_bytes,
        "shard_bytes": shard_bytes,
        "twice_bytes": twice_bytes,
        "peak_bytes": peak_bytes,
    }


def run_rank(number: int, job: Job, directory: str) -> None:
    """One rank: all systems in turns; rank 0 writes the most of all ranks."""
    torch.set_num_threads(1)
    if job.rounds == 0:
        _give_back_at_once()
    rank = job.rank(number)
    if job.device == "cuda":
        torch.cuda.set_device(rank.device)
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo",
        init_method=f"file://{directory}/store",
        rank=number,
        world_size=job.layout.num_ranks,
    )
    ways = {name: system(rank) for name, system in SYSTEMS.items()}
    counted = {name: checked(way, rank.device) for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(job.rounds):
        for name, way in ways.items():
            seconds[name].append(transition_s(way, rank.device))
    everyone: list[tuple[dict[str, dict[str, int]], dict[str, list[float]]]] = [(counted, seconds)]
    everyone *= job.layout.num_ranks
    dist.all_gather_object(everyone, (counted, seconds))
    if number == 0:
        result = {name: asdict(_most(name, everyone)) for name in ways}
        Path(directory, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _most(
    name: str, everyone: Sequence[tuple[dict[str, dict[str, int]], dict[str, list[float]]]]
) -> Measured:
    counted = {key: max(bytes_[name][key] for bytes_, _ in everyone) for key in everyone[0][0][name]}
    slowest = [max(rounds) for rounds in zip(*(seconds[name] for _, seconds in everyone), strict=True)]
    return Measured(**counted, seconds=slowest)


def started(job: Job) -> dict[str, Measured]:
    """Run the ranks of a job, forks of this process, to their end."""
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.start_processes(
            run_rank, args=(job, directory), nprocs=job.layout.num_ranks, start_method="fork"
        )
        found = json.loads(Path(directory, "result.json").read_text())
    return {name: Measured(**measured) for name, measured in found.items()}


def measure(job: Job) -> dict[str, Measured]:
    """Times from one set of processes, peaks from another."""
    timed = started(job)
    if job.device == "cuda":
        return timed
    paged = started(replace(job, rounds=0))
    return {name: replace(timed[name], peak_bytes=found.peak_bytes) for name, found in paged.items()}


def layout_of(text: str) -> ParallelLayout:
    """`1,4,1:1,2` trains in p=1, t=4, d=1 and generates in p=1, t=2."""
    train, generate = ([int(size) for size in sizes.split(",")] for sizes in text.split(":"))
    p, t, d = train
    return ParallelLayout(p, t, d, generation=Generation(*generate))


def shown(text: str, found: Mapping[str, Measured]) -> dict[str, dict[str, float]]:
    """Print one table; return the time of the others over ours, round by round."""
    print(f"\n{text:<16}{'received':>10}{'shard':>10}{'twice':>10}{'peak':>10}  MB{'there and back':>18}")
    ratios = {}
    for name, one in found.items():
        sizes = (one.received_bytes, one.shard_bytes, one.twice_bytes, one.peak_bytes)
        row = "".join(f"{size / 1e6:>10.1f}" for size in sizes)
        line = f"{name:<16}{row}    {statistics.median(one.seconds) * 1e3:>15.0f} ms"
        if name != "hybridflow":
            both = zip(one.seconds, found["hybridflow"].seconds, strict=True)
            times = spread([theirs / ours for theirs, ours in both])
            ratios[name] = times.as_dict()
            line += f"   / ours {times}"
        print(line, flush=True)
    return ratios


def main() -> None:
    """Measure layout by layout, print, and write the result."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="p,t,d:pg,tg of each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name, value in vars(Actor()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    actor = Actor(hidden=args.hidden, layers=args.layers, vocabulary=args.vocabulary)
    model_bytes = 4 * sum(param.numel for param in actor.params)
    print(f"{model_bytes / 4e6:.0f} M parameters, {model_bytes / 1e6:.1f} MB", flush=True)
    results: dict[str, object] = {}
    for text in args.layouts:
        layout = layout_of(text)
        if args.device == "cuda" and layout.num_ranks > torch.cuda.device_count():
            raise SystemExit(
                f"--layouts {text}: {layout.num_ranks} ranks, and {torch.cuda.device_count()} GPUs are here. "
                "NCCL wants a GPU for each rank: give layouts of fewer, or --device cpu."
            )
        found = measure(Job(actor=actor, layout=layout, rounds=args.rounds, device=args.device))
        times = shown(text.replace(":", " -> "), found)
        results[text] = {"systems": {n: asdict(one) for n, one in found.items()}, "times_over_ours": times}
    result = {"machine": machine(), "device": args.device, "actor": vars(actor), "model_bytes": model_bytes}
    print(f"\nwritten: {environments.write_result('transition', {**result, 'layouts': results})}")


if __name__ == "__main__":
    main()
