"""Measures the present machine: the peaks of its devices and links, and the shares that the engines reach.

    this process ── one process a device ──> rank 0 .. rank n-1, all at work at the same time
                                             collectives -> matrix product -> memory -> the engines' probes
                 <── seconds of each rank ── of which the slowest counts
The peaks are those of plain products, copies and collectives. The shares and overheads are fitted to the
seconds of the project's own engines on small models (`probe`), by the simulators' own formulas.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_lightning.cores import usable_cores
from rlhf_lightning.mapping import measured, probe
from rlhf_lightning.mapping.fit import Key, Observation, fit, mean_square
from rlhf_lightning.mapping.hardware import CPU, H100, Efficiency, Hardware, Overhead
from rlhf_lightning.mapping.machine import host_memory
from rlhf_lightning.mapping.phases import Iteration

_SHARES = ("matmul", "attention", "memory", "decode_matmul", "prefill_matmul", "weights", "kv")
_LAUNCHES = ("layer", "decode_step", "decode_layer", "decode_sequence")
FREE: tuple[Key, ...] = (
    *(("efficiency", name) for name in _SHARES),
    *(("overhead", name) for name in _LAUNCHES),
)
"""The numbers that are fitted to the engines' seconds."""
_PEAKS = {
    "peak_flops": ("matmul", "attention", "prefill_matmul", "decode_matmul"),
    "memory_bandwidth": ("memory", "weights", "kv"),
}
"""Peaks, and the shares of each."""
_ROOM = 8.0
"""Factor by which a measured peak may turn out too low: during the fit peaks are raised by it."""
_SMALL, _LARGE = 2**10, 2**24
"""Bytes of the collectives that show the latency and the bandwidth."""
_TIMEOUT_S = 180.0
_CALL_S = 3e-3
"""Assumed overhead of a remote call, which a run's measurements replace (`refine_by_run`). The fixed part of
a transition is set to nearly nothing: the seconds of the probes' generations include it."""


@dataclass(frozen=True)
class _Peaks:
    """What one rank measured."""

    flops: float
    """FLOP/s of a matrix product."""
    bandwidth: float
    """Bytes/s of a copy, read and written."""
    small_s: float
    """Seconds of an all-reduce of `_SMALL` bytes; 0 for a single rank."""
    large_s: float
    """Seconds of an all-reduce of `_LARGE` bytes; 0 for a single rank."""
    probes: dict[str, float]
    """Seconds of the engines' probes, by name."""


def measure(*, name: str = "this-machine", devices: int = 0) -> Hardware:
    """Measure this machine with all its devices at work at the same time.

    Args:
        name: what reports call it.
        devices: how many; 0: every GPU, or two processes on a CPU.

    Raises:
        ValueError: there are fewer GPUs than devices.
        RuntimeError: a process failed, or did not answer in time.
    """
    import rlhf_lightning.engines.fsdp.engine  # noqa: F401, PLC0415 - once, for all processes forked from this one

    cuda = torch.cuda.is_available()
    here = torch.cuda.device_count() if cuda else 0
    if cuda and devices > here:
        raise ValueError(
            f"--devices {devices}: this machine has {here} GPU{'s' if here > 1 else ''}. Try --devices "
            f"{here}, or leave it out, which measures them all."
        )
    devices = devices or here or 2
    peaks = _run(devices, cuda=cuda)
    base = H100 if cuda else CPU
    memory = torch.cuda.get_device_properties(0).total_memory if cuda else host_memory() / devices
    large, small = max(p.large_s for p in peaks), max(p.small_s for p in peaks)
    hops = math.log2(devices) if devices > 1 else 1.0
    latency = small / (2 * hops) if devices > 1 else base.intra_latency
    traffic = 2 * (devices - 1) / devices * _LARGE
    bandwidth = traffic / max(large - small, 1e-9) if devices > 1 else base.intra_bandwidth
    rough = Hardware(
        name=name,
        gpus_per_node=devices,
        memory_bytes=float(memory),
        memory_bandwidth=min(p.bandwidth for p in peaks),
        peak_flops=min(p.flops for p in peaks),
        intra_bandwidth=bandwidth,
        inter_bandwidth=bandwidth if not cuda else base.inter_bandwidth,
        intra_latency=latency,
        inter_latency=latency if not cuda else base.inter_latency,
        efficiency=Efficiency(intra=1.0, inter=1.0, **dict.fromkeys(_SHARES, 0.7)),
        overhead=Overhead(**dict.fromkeys(_LAUNCHES, 1e-4), transition=1e-3, call=_CALL_S),
    )
    seconds = {key: max(p.probes[key] for p in peaks) for key in peaks[0].probes}
    return refine(rough, probe.observations(seconds, gpu=cuda))


def refine(
    hardware: Hardware, observations: Sequence[Observation], *, free: Sequence[Key] = FREE
) -> Hardware:
    """The hardware whose shares and overheads predict measured seconds best; peaks too low are raised.

    Args:
        hardware: where the fit starts.
        observations: the measured seconds.
        free: the numbers that are fitted.
    """
    for peak in _PEAKS:
        hardware = _scaled(hardware, peak, _ROOM)
    fitted = fit(hardware, mean_square(observations), free, tie=0.002)
    for peak, shares in _PEAKS.items():
        most = max(getattr(fitted.efficiency, share) for share in shares)
        fitted = _scaled(fitted, peak, max(most, 1 / _ROOM))
    return fitted


def refine_by_run(hardware: Hardware, iterations: Sequence[Iteration]) -> Hardware:
    """The hardware that predicts a run best: shares and overheads, and the overhead of each remote call."""
    chosen = measured.sample(iterations)
    free = (*FREE, ("overhead", "transition"))
    found = refine(hardware, measured.observations(chosen), free=free)
    call = statistics.median(iteration.call_overhead for iteration in chosen)
    return dataclasses.replace(found, overhead=dataclasses.replace(found.overhead, call=call))


def _scaled(hardware: Hardware, peak: str, factor: float) -> Hardware:
    """The hardware with a peak that is `factor` times as high, and smaller shares of it: the same speeds."""
    shares = {share: getattr(hardware.efficiency, share) / factor for share in _PEAKS[peak]}
    return dataclasses.replace(
        hardware,
        **{peak: getattr(hardware, peak) * factor},
        efficiency=dataclasses.replace(hardware.efficiency, **shares),
    )


def _run(devices: int, *, cuda: bool) -> list[_Peaks]:
    start = (
        multiprocessing.get_context("spawn").Process if cuda else multiprocessing.get_context("fork").Process
    )
    with tempfile.TemporaryDirectory() as directory:
        ranks = []
        for rank in range(devices):
            receive, send = multiprocessing.Pipe(duplex=False)
            process = start(target=_rank, args=(rank, devices, directory, send), daemon=True)
            process.start()
            send.close()
            ranks.append((process, receive))
        try:
            return [_answer(receive) for _, receive in ranks]
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _answer(receive: Connection) -> _Peaks:
    try:
        answer = receive.recv() if receive.poll(_TIMEOUT_S) else f"no answer in {_TIMEOUT_S:.0f} s"
    except EOFError:
        answer = "a process died"
    if isinstance(answer, _Peaks):
        return answer
    raise RuntimeError(f"calibrate: {answer}.")


def _rank(rank: int, devices: int, directory: str, send: Connection) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, usable_cores() // devices))
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.FileStore(str(Path(directory) / "store"), devices),  # type: ignore[attr-defined]
        rank=rank,
        world_size=devices,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    try:
        send.send(_measure(device, Path(directory) / str(rank)))
    except Exception as err:
        send.send(f"rank {rank}: {type(err).__name__}: {err}")
        raise
    finally:
        dist.destroy_process_group()


def _measure(device: torch.device, directory: Path) -> _Peaks:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (768, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.empty(
        2**28 if device.type == "cuda" else 2**25, dtype=torch.float32, device=device
    ).zero_()
    target = torch.empty_like(source)
    small, large = (torch.zeros(size // 4, device=device) for size in (_SMALL, _LARGE))
    together = dist.get_world_size() > 1

    def seconds(call: Callable[[], object], repeats: int = 0) -> float:
        dist.barrier()
        return clock(call, device, repeats=repeats)

    return _Peaks(
        small_s=seconds(lambda: dist.all_reduce(small), 50) if together else 0.0,
        large_s=seconds(lambda: dist.all_reduce(large), 10) if together else 0.0,
        flops=2 * size**3 / seconds(lambda: torch.mm(left, right)),
        bandwidth=2 * source.nbytes / seconds(lambda: target.copy_(source)),
        probes=probe.run(directory, device, seconds),
    )


def clock(call: Callable[[], object], device: torch.device, *, repeats: int = 0) -> float:
    """Median seconds of a call after a warm-up.

    Args:
        call: what to time.
        device: that it computes on.
        repeats: how often; 0: as often as takes about 0.3 s, at most 20 times.
    """

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    first = once()
    count = repeats or min(20, max(1, int(0.3 / max(first, 1e-6))))
    times = sorted([first, *(once() for _ in range(count))])
    return times[len(times) // 2]
