"""The simulators of training, inference (scoring) and the transition to generation, for one model.

    rows of a replica      r = ceil(batch / (mini-batches d)), m = ceil(r / micro-batch)
    an update              (m + p - 1) (forward + backward [+ forward again]) + gradients + optimizer
    a pass over the batch  (m + p - 1) forward
The p - 1 slots are the pipeline bubble (Narayanan 2021, section 2.2), which counts in RLHF, where
micro-batches are few. The gradients' communication is not overlapped with the backward pass; by
`Workload.sharding` it is
    none     all-reduce of float32 gradients                          4 N / (p t)
    states   reduce-scatter of gradients, all-gather of parameters    (Rajbhandari 2020, section 7.2)
    full     for every micro-batch: all-gather of parameters, for the forward pass and with `reshards` for the
             backward pass again, and reduce-scatter of gradients; with `defers` that is once an update
With hybrid sharding, ranks that hold the same part of different copies all-reduce its gradients as well.
The optimizer reads gradients and states and writes states and parameters: it is bound by memory bandwidth.
"""

from __future__ import annotations

from rlhf_lightning.mapping import layers, network
from rlhf_lightning.mapping.estimate import Estimate, add
from rlhf_lightning.mapping.generate import generate
from rlhf_lightning.mapping.hardware import Hardware
from rlhf_lightning.mapping.layers import Cost, Setting
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import ParallelLayout

__all__ = ["Estimate", "generate", "infer", "train", "transition"]

_OPTIMIZER_BYTES = 28
"""For each parameter a step reads 4 bytes of gradient and 12 of master and moments, and writes 12."""


def train(hardware: Hardware, shape: ModelShape, layout: ParallelLayout, workload: Workload) -> Estimate:
    """All updates of one iteration: forward and backward passes, gradients, optimizer."""
    at = Setting(hardware, shape, layout, workload)
    count, size = workload.micro_batches(layout.d, parts=workload.mini_batches)
    forward, backward = _stage(at, size)
    cost = forward.plus(backward)
    if workload.recompute:
        cost = cost.plus(layers.layer(at, size)[0].times(at.stage_layers))
    parts = _pipelined(at, cost, count=count, sends=2 * size)
    add(parts, network.shard_group(hardware, layout, layout.d).network, _gradients(at, count))
    add(parts, "memory bandwidth", _optimizer(at))
    total = {name: workload.mini_batches * seconds for name, seconds in parts.items()}
    add(total, "overhead", hardware.overhead.call)
    return Estimate.of(total)


def infer(hardware: Hardware, shape: ModelShape, layout: ParallelLayout, workload: Workload) -> Estimate:
    """One forward pass over the batch."""
    at = Setting(hardware, shape, layout, workload)
    count, size = workload.micro_batches(layout.d)
    forward, _ = _stage(at, size)
    parts = _pipelined(at, forward, count=count, sends=size)
    if workload.sharding == "full":
        gathers = count if workload.reshards else 1
        add(parts, _shard_group(at).network, gathers * _gather_parameters(at))
    add(parts, "overhead", hardware.overhead.call)
    return Estimate.of(parts)


def transition(hardware: Hardware, shape: ModelShape, layout: ParallelLayout, workload: Workload) -> Estimate:
    """The actor's weights from the training layout to the generation layout, and the fixed part.

    HybridFlow section 5.3 and Table 2: every rank gathers what it lacks of its generation shard within its
    micro data-parallel group, (t p - tg pg) / (tg pg t p) of the model. Where parameters are sharded over
    data-parallel ranks as well (`full`), they are gathered from these too.
    """
    whole = layers.device_parameters(shape, layout.generating.copy_layout) * workload.element
    group = network.reshard_group(hardware, layout)
    parts = {group.network: network.all_gather(hardware, group, whole)}
    if workload.sharding == "full":
        data = network.shard_group(hardware, layout, workload.sharers(layout.d))
        add(parts, data.network, network.all_gather(hardware, data, whole / group.size))
    add(parts, "overhead", hardware.overhead.transition)
    return Estimate.of(parts)


def _stage(at: Setting, rows: int) -> tuple[Cost, Cost]:
    """Forward and backward pass of the slowest stage, the last one, which has the head."""
    forward, backward = layers.layer(at, rows)
    first, second = layers.head(at, rows)
    return forward.times(at.stage_layers).plus(first), backward.times(at.stage_layers).plus(second)


def _pipelined(at: Setting, cost: Cost, *, count: int, sends: int) -> dict[str, float]:
    """Seconds by what they are spent on, of `count` micro-batches through the pipeline.

    Args:
        at: the model and its work.
        cost: of a micro-batch in the slowest stage.
        count: micro-batches.
        sends: rows whose activations a micro-batch sends between neighbouring stages, both passes together.
    """
    tensor, stages = network.tensor_group(at.hardware, at.layout), network.stage_group(at.hardware, at.layout)
    edge = sends * at.workload.row_tokens * at.shape.hidden * at.workload.element / at.layout.t
    hop = network.send(at.hardware, stages, edge)
    parts = {"compute": count * cost.compute, "memory bandwidth": count * cost.memory}
    add(parts, tensor.network, count * cost.network)
    add(parts, stages.network, count * hop)
    add(parts, "launches", count * cost.launch)
    add(parts, "pipeline bubble", (at.layout.p - 1) * (cost.seconds + hop))
    return parts


def _gradients(at: Setting, micro_batches: int) -> float:
    """Seconds of the data-parallel communication of an update; see the head of the module."""
    gradients, sharers = 4 * at.trained, at.workload.sharers(at.layout.d)
    copies = network.copy_group(at.hardware, at.layout, sharers)
    added = network.all_reduce(at.hardware, copies, gradients / sharers)
    if at.workload.sharding == "none":
        return added
    scatter = network.all_gather(at.hardware, _shard_group(at), gradients) + added
    gather = _gather_parameters(at)
    if at.workload.sharding == "gradients":
        return micro_batches * scatter + gather
    if at.workload.sharding == "states":
        return scatter + gather
    gathers = micro_batches * (2 if at.workload.reshards else 1)
    return gathers * gather + (1 if at.workload.defers else micro_batches) * scatter


def _gather_parameters(at: Setting) -> float:
    size = at.parameters * at.workload.element
    return network.all_gather(at.hardware, _shard_group(at), size)


def _shard_group(at: Setting) -> network.Group:
    return network.shard_group(at.hardware, at.layout, at.workload.sharers(at.layout.d))


def _optimizer(at: Setting) -> float:
    traffic = _OPTIMIZER_BYTES * at.trained / at.workload.sharers(at.layout.d)
    return traffic / (at.hardware.efficiency.memory * at.hardware.memory_bandwidth)
