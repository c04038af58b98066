"""The simulator of generation: prefill, and decoding with a bounded number of resident sequences.

A replica of tg x pg devices has n = ceil(batch / replicas) rows. At most R are resident, that is decoded at
once: the engine's limit, or as many as have room for keys and values of their prompt and mean response. A
finished row makes room for a waiting one: equal lengths come in ceil(n / R) waves, all of one size, so that
more room never takes longer; unequal ones end in a tail, with which a little more may take somewhat longer.

A step that decodes b sequences with c tokens of context in all, on a stage of N weights a device:
    products    max(2 bytes N / (e_weights B), 2 N b / (e_decode F))     the roofline (Williams 2009)
    context     c kv_bytes / (e_kv B)
    network     2 all-reduces a layer of b h numbers
    overhead    decode_step + layers decode_layer + b decode_sequence    the same on any number of devices
With pg stages, pg parts of the b sequences are in flight: a step takes pg times a stage's time for b / pg.
Steps are not simulated one by one but in spans: b changes only where sequences end, and in between the time
is linear in the context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_lightning.mapping import network
from rlhf_lightning.mapping.estimate import Estimate, add
from rlhf_lightning.mapping.hardware import Hardware
from rlhf_lightning.mapping.layers import stage_layers
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import ParallelLayout

_MAX_ENDS = 32
"""Lengths are rounded up to multiples of 1 / this of the longest, so that sequences end at few steps."""


def generate(
    hardware: Hardware, shape: ModelShape, layout: ParallelLayout, workload: Workload, *, kv_bytes: float
) -> Estimate:
    """All responses of one iteration.

    Args:
        hardware: the cluster.
        shape: the model.
        layout: how it is divided, in generation too.
        workload: the work.
        kv_bytes: room for keys and values on each device; infinite seconds where no sequence fits into it.
    """
    replica = Replica(hardware, shape, layout.generating.copy_layout, workload)
    rows = replica_rows(layout, workload)
    resident = min(rows, replica.capacity(kv_bytes), workload.max_resident or rows)
    if resident < 1:
        return Estimate(math.inf, "KV memory", {"KV memory": math.inf})
    parts = {"overhead": hardware.overhead.call}
    for span in _spans(rows, resident, workload):
        replica.decode(parts, span)
        replica.prefill(parts, span.started)
    return Estimate.of(parts)


def replica_rows(layout: ParallelLayout, workload: Workload) -> int:
    """Rows of the fullest replica of generation."""
    return math.ceil(workload.batch / layout.generating.num_replicas)


@dataclass(frozen=True)
class Span:
    """Consecutive steps of a replica in which the same sequences are decoded."""

    steps: float
    """How many."""
    sequences: float
    """Sequences decoded in each step."""
    context: float
    """Tokens of all these sequences together, prompts included, on average over the steps."""
    started: float
    """Sequences that join at its first step, whose prompts are computed before."""


def _spans(rows: int, resident: int, workload: Workload) -> Iterator[Span]:
    """The spans of a replica's generation, in order.

    Sequences are counted in fractions: waves are of one size; of unequal lengths those that start together
    end in equal shares after each of the `response_lengths`.
    """
    longest = max(workload.response_lengths)
    if min(workload.response_lengths) == longest:
        waves = math.ceil(rows / resident)
        each = rows / waves
        yield from [Span(longest, each, each * (workload.prompt_tokens + longest / 2), each)] * waves
        return
    grain = math.ceil(longest / _MAX_ENDS)
    lengths = [grain * math.ceil(length / grain) for length in workload.response_lengths]
    ends: dict[int, list[tuple[int, float]]] = {}
    waiting, step, active, starts = float(rows), 0, 0.0, 0.0
    free = float(resident)
    while True:
        started = min(waiting, free)
        waiting, free, active, starts = (
            waiting - started,
            free - started,
            active + started,
            starts + started * step,
        )
        for length in lengths if started else ():
            ends.setdefault(step + length, []).append((step, started / len(lengths)))
        if not ends:
            return
        end = min(ends)
        middle = (step + end) / 2
        context = active * (workload.prompt_tokens + middle) - starts
        yield Span(end - step, active, context, started)
        step = end
        for start, count in ends.pop(end):
            active, starts, free = active - count, starts - count * start, free + count


class Replica:
    """One generation engine; its methods add seconds to the parts of an `Estimate`.

    Args:
        hardware: the cluster.
        shape: the model.
        layout: of the engine's own devices, pg x tg of them.
        workload: the work.
    """

    def __init__(
        self, hardware: Hardware, shape: ModelShape, layout: ParallelLayout, workload: Workload
    ) -> None:
        self._hardware, self._shape, self._layout, self._workload = hardware, shape, layout, workload
        self._group = network.tensor_group(hardware, layout)
        self._depth = stage_layers(shape, layout)
        self._kv = shape.kv_bytes(tensor=layout.t, pipeline=layout.p, element=workload.element)
        matrices = self._depth * shape.layer_matrix_parameters + shape.head_parameters
        self._weights = matrices / layout.t

    def capacity(self, kv_bytes: float) -> int:
        """Sequences whose keys and values fit into `kv_bytes` on each device."""
        mean = sum(self._workload.response_lengths) / len(self._workload.response_lengths)
        return int(kv_bytes / (self._kv * (self._workload.prompt_tokens + mean)))

    def decode(self, parts: dict[str, float], span: Span) -> None:
        """Add the decoding steps of a span."""
        hardware, e, pg = self._hardware, self._hardware.efficiency, self._layout.p
        sequences = span.sequences / pg
        read = self._workload.element * self._weights / (e.weights * hardware.memory_bandwidth)
        product = 2 * self._weights * sequences / (e.decode_matmul * hardware.peak_flops)
        name = "memory bandwidth" if read >= product else "compute"
        context = span.context * self._kv / (e.kv * hardware.memory_bandwidth)
        message = sequences * self._shape.hidden * self._workload.element
        reduces = 2 * self._depth * network.all_reduce(hardware, self._group, message)
        fixed = self._launches() + span.sequences * hardware.overhead.decode_sequence
        add(parts, name, span.steps * pg * max(read, product))
        add(parts, "memory bandwidth", span.steps * context)
        add(parts, self._group.network, span.steps * pg * reduces)
        add(parts, "per-step overhead", span.steps * fixed)

    def prefill(self, parts: dict[str, float], prompts: float) -> None:
        """Add one forward pass over `prompts` prompts, with the bubble of the pipeline."""
        if not prompts:
            return
        hardware, e = self._hardware, self._hardware.efficiency
        tokens = prompts * self._workload.prompt_tokens
        flops = self._layout.t * hardware.peak_flops
        products = 2 * self._depth * self._shape.layer_matrix_parameters * (tokens + hardware.overhead.rows)
        scores = 2 * self._depth * self._shape.query_width * tokens * self._workload.prompt_tokens
        message = tokens * self._shape.hidden * self._workload.element
        reduces = 2 * self._depth * network.all_reduce(hardware, self._group, message)
        bubble = 1 + (self._layout.p - 1) / max(1.0, prompts)
        compute = products / (e.prefill_matmul * flops) + scores / (e.attention * flops)
        add(parts, "compute", bubble * compute)
        add(parts, self._group.network, bubble * reduces)
        add(parts, "per-step overhead", self._launches())

    def _launches(self) -> float:
        """Fixed seconds of a forward pass in the generation engine: of the step and of each layer."""
        overhead = self._hardware.overhead
        return overhead.decode_step + self._shape.layers * overhead.decode_layer
