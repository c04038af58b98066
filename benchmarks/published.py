"""Published measurements on A100-80GB and their predictions: efficiencies in `hardware` are fitted to them.

No other published number was used. `benchmarks.mapping fit` repeats the fit; docs/simulators.md lists the
errors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from rlhf_lightning.mapping import memory, shapes, simulate
from rlhf_lightning.mapping.generate import Replica, Span
from rlhf_lightning.mapping.hardware import Hardware
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import Generation, ParallelLayout


@dataclass(frozen=True)
class Row:
    """One measurement beside its prediction."""

    name: str
    """What was measured."""
    unit: str
    """Unit of both numbers."""
    measured: float
    """As published."""
    predicted: float
    """By the simulators."""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class _Megatron:
    name: str
    hidden: int
    layers: int
    heads: int
    layout: ParallelLayout
    batch: int
    tflops: float


_MEGATRON = (
    _Megatron("1.7B", 2304, 24, 24, ParallelLayout(1, 1, 32), 512, 137),
    _Megatron("18.4B", 6144, 40, 48, ParallelLayout(1, 8, 32), 1024, 135),
    _Megatron("145.6B", 12288, 80, 96, ParallelLayout(8, 8, 24), 2304, 148),
)
_HYBRIDFLOW = (("llama-7b", 8, 5714.0), ("llama-13b", 16, 6270.0))
_OPT = ModelShape(
    name="opt-13b", layers=40, hidden=5120, intermediate=20480, heads=40, kv_heads=40,
    vocab=50272, tied=True, gated=False,
)  # fmt: skip
_KV_TOKENS = 50_000
"""Tokens of context for which an A100-80GB has room beside the weights of OPT-13B."""


def rows(hardware: Hardware) -> list[Row]:
    """Every measurement; of the two curves the points that the fit uses."""
    return [*megatron(hardware), *hybridflow(hardware), *prefill(hardware), *decode(hardware)]


def megatron(hardware: Hardware) -> Iterator[Row]:
    """Megatron-LM, Narayanan 2021, table 1: FLOP as its equation 3 counts them, with recomputation.

    Its cluster has 200 Gbit/s for each GPU. Attention is not fused, states are not sharded, and the
    micro-batch is the best of 1, 2, 4 and 8 (section 3.4).
    """
    cluster = dataclasses.replace(hardware, inter_bandwidth=8 * 25e9)
    for row in _MEGATRON:
        shape = ModelShape(
            name=row.name, layers=row.layers, hidden=row.hidden, intermediate=4 * row.hidden, heads=row.heads,
            kv_heads=row.heads, vocab=51200, tied=True, gated=False,
        )  # fmt: skip
        works = [
            Workload(
                prompt=1024, response=1024, batch=row.batch, mini_batches=1, micro_batch_tokens=2048 * size,
                fused_attention=False, sharding="none",
            )
            for size in (1, 2, 4, 8)
        ]  # fmt: skip
        seconds = min(simulate.train(cluster, shape, row.layout, work).seconds for work in works)
        factor = 1 + 2048 / (6 * row.hidden) + 51200 / (16 * row.layers * row.hidden)
        flop = 96 * row.batch * 2048 * row.layers * row.hidden**2 * factor
        tflops = flop / (row.layout.num_ranks * seconds * 1e12)
        yield Row(f"Megatron-LM {row.name}, training", "TFLOP/s a GPU", row.tflops, tflops)


def hybridflow(hardware: Hardware) -> Iterator[Row]:
    """HybridFlow, PPO with four models of one size: tokens of a batch per second of an iteration.

    Predicted for all models on the same devices in the same layout, the fastest one.
    """
    for name, devices, measured in _HYBRIDFLOW:
        work = Workload()
        tokens = work.batch * (work.prompt + work.response)
        seconds = min(
            colocated(hardware, name, ParallelLayout(p, t, devices // (p * t), generation=Generation(1, tg)))
            for p, t, tg in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8))
            if p * t <= devices and tg <= t
        )
        yield Row(f"HybridFlow PPO {name}, {devices} GPUs", "tokens/s", measured, tokens / seconds)


def colocated(hardware: Hardware, name: str, layout: ParallelLayout) -> float:
    """Seconds of a PPO iteration with four models on the same devices; infinite where they do not fit."""
    work, actor = Workload(), shapes.load(name)
    critic = actor.with_head("scalar")
    generation, free = colocated_generation(hardware, name, layout)
    trains = [memory.training(shape, layout, work) for shape in (actor, critic)]
    rests = [memory.resting(shape, layout, work, trained=True) for shape in (actor, critic)]
    most = max(train.total - rest.total for train, rest in zip(trains, rests, strict=True))
    if most > free:
        return math.inf
    change = simulate.transition(hardware, actor, layout, work)
    scores = [simulate.infer(hardware, shape, layout, work).seconds for shape in (critic, actor, critic)]
    updates = [simulate.train(hardware, shape, layout, work).seconds for shape in (actor, critic)]
    return generation.seconds + change.seconds + sum(scores) + sum(updates)


def colocated_generation(
    hardware: Hardware, name: str, layout: ParallelLayout
) -> tuple[simulate.Estimate, float]:
    """The actor's generation beside three resting models of its size, and the bytes free of all four."""
    work, actor = Workload(), shapes.load(name)
    critic = actor.with_head("scalar")
    models = ((actor, True), (critic, True), (actor, False), (critic, False))
    rest = sum(memory.resting(shape, layout, work, trained=trained).total for shape, trained in models)
    free = hardware.usable_bytes - rest
    extra = memory.generation(actor, layout, work).total
    kv_bytes = max(0.0, free - extra)
    return simulate.generate(hardware, actor, layout, work, kv_bytes=kv_bytes), free


def prefill(hardware: Hardware) -> Iterator[Row]:
    """OPT-13B on one GPU: 16.46 + 0.0927 tokens + 6.5e-6 sum(length^2) milliseconds."""
    for count, length in product((1, 4, 16), (128, 512, 1024)):
        replica = Replica(hardware, _OPT, ParallelLayout(), Workload(real_prompt=length))
        parts: dict[str, float] = {}
        replica.prefill(parts, count)
        measured = 16.46 + 0.0927 * count * length + 6.5e-6 * count * length**2
        yield Row(f"OPT-13B prefill {count} x {length}", "ms", measured, 1e3 * sum(parts.values()))


def decode(hardware: Hardware) -> Iterator[Row]:
    """OPT-13B on one GPU: a decoding step, by batch and tokens of context; the curve has two branches."""
    for batch, length in product((1, 16, 32, 64, 94, 96, 128, 192, 256), (64, 256, 512)):
        context = batch * length
        if context > _KV_TOKENS:
            continue
        parts: dict[str, float] = {}
        replica = Replica(hardware, _OPT, ParallelLayout(), Workload())
        replica.decode(parts, Span(steps=1, sequences=batch, context=context, started=0))
        small = 19.93 + 6.3e-4 * context + 0.0385 * batch
        large = 7.17 + 5.8e-4 * context + 0.158 * batch
        measured = small if batch < 95 else large
        yield Row(f"OPT-13B decode {batch} x {length}", "ms", measured, 1e3 * sum(parts.values()))
