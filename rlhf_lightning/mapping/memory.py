"""The memory model: bytes on the fullest device of a model, by phase and by kind.

    training     parameters + gradients + states + activations
    inference    parameters + activations of one layer
    generation   parameters of the generation layout + keys and values + buffers
    resting      what stays on the devices while another model computes there; nothing with `offload`
N parameters of a device, as in `layers.device_parameters`:
    parameters   `element` N, and 4 N of float32 masters with `masters`
    gradients    4 N; between two updates none without `keeps_gradients`
    states       8 N, the moments of Adam
With adapters, masters, gradients and states are theirs alone; what ZeRO keeps on the host is left out.
By `Workload.sharding` the d data-parallel ranks divide masters and states (`states`), gradients too
(`gradients`), or everything (`full`), which has no second copy in the computation's type and gathers a layer
at a time, or all layers where it does not reshard. Gradients that it defers are whole until they are reduced.
Activations: Korthikanti 2022 (see `layers.activation_bytes`) for the min(p, m) micro-batches in flight on
the first stage (Narayanan 2021, section 2.2.1; see `_in_flight`), or with recomputation the inputs of its
layers and one layer whole.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from rlhf_lightning.mapping.generate import replica_rows
from rlhf_lightning.mapping.layers import (
    activation_bytes,
    device_parameters,
    stage_layers,
    trained_parameters,
)
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import ParallelLayout

_PREFILL_TOKENS = 4096
"""Tokens of prompts that a generation engine computes at once."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes of one model on a device, by kind."""

    parameters: float = 0.0
    """Weights, with their float32 masters."""
    gradients: float = 0.0
    """Gradients, float32."""
    states: float = 0.0
    """Moments of the optimizer."""
    activations: float = 0.0
    """Activations of the micro-batches in flight, and logits."""
    buffers: float = 0.0
    """Parameters gathered for a short time, and other work space."""
    host: float = 0.0
    """Bytes in the host's memory, which `total` leaves out."""

    @property
    def total(self) -> float:
        """Bytes on the device."""
        resident = self.parameters + self.gradients + self.states
        return resident + self.activations + self.buffers


def training(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> Parts:
    """Bytes while the model trains."""
    trained, shared = trained_parameters(shape, layout, workload), workload.sharers(layout.d)
    return Parts(
        parameters=_training_parameters(shape, layout, workload),
        gradients=_gradients(trained, shared, workload),
        states=0.0 if workload.states_on_host else 8 * trained / shared,
        activations=_activations(shape, layout, workload),
        buffers=_gathered(shape, layout, workload),
    )


def _gradients(trained: float, shared: int, workload: Workload) -> float:
    """Bytes of gradients; those of shards lie on the host where their masters do."""
    if workload.sharding == "full" and workload.states_on_host:
        return 0.0
    divided = workload.sharding == "gradients" or (workload.sharding == "full" and not workload.defers)
    return 4 * trained / (shared if divided else 1)


def inference(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> Parts:
    """Bytes while a model that does not train scores rows."""
    tokens = workload.micro_batches(layout.d)[1] * workload.row_tokens
    layer = activation_bytes(shape, layout, workload) * tokens
    return Parts(
        parameters=_scoring_parameters(shape, layout, workload),
        activations=layer + _logits(shape, layout, workload, tokens),
        buffers=_gathered(shape, layout, workload),
    )


def generation(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> Parts:
    """Bytes while the actor generates, without keys and values, which take what is free.

    Where its training shard is a part of the generation shard (`Workload.held_once`), only the rest of the
    generation shard comes on top of `resting`.
    """
    inside = layout.generating.copy_layout
    weights = workload.element * device_parameters(shape, inside)
    shared = workload.sharers(layout.d) > 1 or workload.masters_beside  # ZeRO 3 gathers on one rank too
    if workload.held_once and not (workload.sharding == "full" and shared):
        own = workload.element * device_parameters(shape, layout)
        weights = max(0.0, weights - own)
    logits = 8 * (workload.max_resident or 256) * shape.vocab / inside.t
    return Parts(
        parameters=weights, buffers=_PREFILL_TOKENS * activation_bytes(shape, inside, workload) + logits
    )


def kv_needed(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> float:
    """Bytes a device that keys and values take where every row that the engine admits is resident."""
    rows = replica_rows(layout, workload)
    rows = min(rows, workload.max_resident or rows)
    tokens = workload.prompt_tokens + max(workload.response_lengths)
    return rows * tokens * _token_kv(shape, layout, workload)


def kv_limit(shape: ModelShape, layout: ParallelLayout, workload: Workload, *, device: float) -> float:
    """Bytes a device that the engine gives keys and values: those of a row at least, none without room.

    Args:
        shape: the model.
        layout: how it is divided.
        workload: the work.
        device: bytes of a device's memory.
    """
    if workload.generation_share == 1 and not workload.kv_limit and not workload.reserves:
        return math.inf
    left = workload.generation_share * device - generation(shape, layout, workload).total
    if left <= 0 and not workload.kv_limit:
        return 0.0  # the engine does not start
    most = workload.kv_limit or left
    return max(most, kv_needed(shape, layout, dataclasses.replace(workload, batch=1, mini_batches=1)))


def rows_at_once(shape: ModelShape, layout: ParallelLayout, workload: Workload, *, free: float) -> int:
    """Rows of a replica for which `free` bytes a device have room, each at its longest; 0: all its rows."""
    rows = replica_rows(layout, workload)
    each = _token_kv(shape, layout, workload) * (workload.prompt + workload.response)
    most = max(1, int(free // each))
    most = min(most, workload.max_resident or most)
    return most if most < rows else 0


def footprint(shape: ModelShape, layout: ParallelLayout, workload: Workload, *, trained: bool) -> Parts:
    """The model itself, on the devices while it computes; without what only its call needs."""
    if not trained:
        return Parts(parameters=_scoring_parameters(shape, layout, workload))
    kept = 0.0 if workload.offload else _kept(shape, layout, workload)
    reduced = training(shape, layout, dataclasses.replace(workload, defers=False))  # after the update
    gradients = reduced.gradients if workload.keeps_gradients else 0.0
    return dataclasses.replace(reduced, gradients=gradients, activations=kept, buffers=0.0)


def resting(shape: ModelShape, layout: ParallelLayout, workload: Workload, *, trained: bool) -> Parts:
    """The model while another one computes on the devices; with `offload` it is in the host's memory."""
    whole = footprint(shape, layout, workload, trained=trained)
    return Parts(host=whole.total) if workload.offload else whole


def _token_kv(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> float:
    """Bytes of the keys and values of one token on a device that generates."""
    generating = layout.generating
    return shape.kv_bytes(tensor=generating.t, pipeline=generating.p, element=workload.element)


def _training_parameters(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> float:
    """Bytes of weights and masters between two passes."""
    count, shared = device_parameters(shape, layout), workload.sharers(layout.d)
    masters = 0.0 if workload.states_on_host else 4 * trained_parameters(shape, layout, workload)
    if workload.parameters_on_host:
        return masters / shared
    if workload.sharding != "full" or shared == 1:
        return workload.element * count + (masters / shared if workload.masters else 0.0)
    if workload.masters_beside:
        return (workload.element * count + masters) / shared
    # Of what learns the masters alone stay.
    copied = count - masters / 4
    return (masters + workload.element * copied) / shared


def _gathered(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> float:
    """Bytes gathered from shards or the host: of the layer computed and the next, or of all that stay."""
    sharded = workload.sharding == "full" and workload.sharers(layout.d) > 1
    if sharded and not workload.reshards:
        return workload.element * device_parameters(shape, layout)
    layers = 2 * shape.layer_parameters * workload.element / layout.t
    return layers if sharded or workload.parameters_on_host else 0.0


def _scoring_parameters(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> float:
    if workload.follows:
        return _training_parameters(shape, layout, workload)
    if workload.parameters_on_host:
        return 0.0
    count = device_parameters(shape, layout)
    return workload.element * count / (workload.sharers(layout.d) if workload.sharding == "full" else 1)


def _activations(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> float:
    count, size = workload.micro_batches(layout.d, parts=workload.mini_batches)
    tokens = size * workload.row_tokens
    whole = activation_bytes(shape, layout, workload) * tokens
    in_flight = _in_flight(layout.p, count, workload.chunks)
    depth = stage_layers(shape, layout)
    if workload.recompute:
        inputs = workload.element * shape.hidden * tokens
        inputs /= layout.t if workload.sequence_parallel else 1
        kept = inputs * depth * in_flight + whole
    else:
        kept = whole * depth * in_flight
    return max(kept, _kept(shape, layout, workload)) + _logits(shape, layout, workload, tokens)


def _in_flight(p: int, count: int, chunks: int) -> float:
    """Micro-batches whose activations the first stage holds; an interleaved schedule counts runs of layers.

    It is (p - 1) 2 + (chunks - 1) p of them ahead, and computes one (Narayanan 2021, section 2.2.2).
    """
    if chunks == 1 or p == 1:
        return min(p, count)
    return min(((p - 1) * 2 + (chunks - 1) * p + 1) / chunks, count)


def _kept(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> float:
    """Bytes of activations and logits that stay from scoring to the update: `Workload.kept_tokens`."""
    tokens = min(workload.kept_tokens, math.ceil(workload.batch / layout.d) * workload.row_tokens)
    inputs = workload.element * shape.hidden
    layer = inputs if workload.recompute else activation_bytes(shape, layout, workload)
    logits = workload.element * shape.vocab if shape.head == "lm" else 0
    return tokens * (layer * stage_layers(shape, layout) + logits)


def _logits(shape: ModelShape, layout: ParallelLayout, workload: Workload, tokens: float) -> float:
    """Bytes of the logits of `tokens` tokens: in the computation's type, in float32, and their gradient."""
    width = shape.vocab / layout.t if shape.head == "lm" else 1
    return tokens * width * (workload.element + 8)
