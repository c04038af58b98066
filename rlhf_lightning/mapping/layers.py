"""Seconds that a micro-batch spends in a layer and in the head of a model, forward and backward.

T tokens of the micro-batch, S tokens of a row, h hidden size, t tensor shards, F peak FLOP/s, B memory
bandwidth, e_* efficiencies.

    matrix products   2 W (T + T0) / t / (e_matmul F)   W weights of the layer (Kaplan 2020, section 2.1);
                                                        T0 rows fill and drain the device
    attention         2 q S T / t / (e_attention F)     q width of all query heads; the causal half of
                                                        4 q S T (Narayanan 2021, appendix)
    element-wise      2 A T / (e_memory B)              A bytes of activations (Korthikanti 2022, eq. 1, 2),
                                                        each written once and read once
    tensor parallel   2 all-reduces of T h numbers      (Shoeybi 2019, section 3)
A backward pass has twice the products (once with adapters, as the weights have no gradients), twice the
element-wise work, 2.5 times the fused attention (Dao 2023, section 4.1: five products for two) and the same
all-reduces. Attention that is not fused is two full matrix products whose scores add 5 heads S / t bytes a
token to A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rlhf_lightning.mapping import network
from rlhf_lightning.mapping.hardware import Hardware
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class Setting:
    """A model in a layout on a cluster, with its work: what every formula reads."""

    hardware: Hardware
    """The cluster."""
    shape: ModelShape
    """The model."""
    layout: ParallelLayout
    """How the model is divided over its ranks."""
    workload: Workload
    """The work."""

    @property
    def stage_layers(self) -> int:
        """Layers of the longest pipeline stage."""
        return stage_layers(self.shape, self.layout)

    @property
    def parameters(self) -> float:
        """Parameters of the fullest device."""
        return device_parameters(self.shape, self.layout)

    @property
    def trained(self) -> float:
        """Those of them that learn."""
        return trained_parameters(self.shape, self.layout, self.workload)

    @property
    def backward_products(self) -> int:
        """Products of a backward pass for one of the forward pass: inputs' gradients, and the weights'."""
        return 1 if self.workload.lora_rank else 2


class Cost(NamedTuple):
    """Seconds of a pass, by what they are spent on."""

    compute: float
    """Matrix products and attention."""
    memory: float
    """Element-wise kernels."""
    network: float = 0.0
    """Tensor-parallel all-reduces."""
    launch: float = 0.0
    """Kernel launches that no computation hides."""

    @property
    def seconds(self) -> float:
        """Their sum."""
        return self.compute + self.memory + self.network + self.launch

    def times(self, factor: float) -> Cost:
        """The cost of `factor` such passes."""
        return Cost(*(factor * part for part in self))

    def plus(self, other: Cost) -> Cost:
        """The cost of both, one after the other."""
        return Cost(*(one + another for one, another in zip(self, other, strict=True)))


def activation_bytes(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> float:
    """Bytes of activations that a layer keeps for its backward pass, for each token on each device.

    Korthikanti 2022, eq. 1, 2 and 4, for any widths: 5 h numbers outside what tensor shards divide (also
    divided with `sequence_parallel`); inside it, over t, queries, keys, values, the attention's output, and
    what the feed-forward layer keeps.
    """
    outside = 5 * shape.hidden * workload.element
    feed_forward = (4 if shape.gated else 2) * shape.intermediate
    inside = float((2 * shape.query_width + 2 * shape.kv_width + feed_forward) * workload.element)
    if not workload.fused_attention:
        inside += 5 * shape.heads * workload.row_tokens
    return (outside / layout.t if workload.sequence_parallel else outside) + inside / layout.t


def layer(at: Setting, rows: int) -> tuple[Cost, Cost]:
    """Costs of one layer's forward and backward pass over `rows` rows, without recomputation."""
    hardware, shape, workload = at.hardware, at.shape, at.workload
    tokens, e = rows * workload.row_tokens, hardware.efficiency
    flops = hardware.peak_flops * at.layout.t
    products = 2 * shape.layer_matrix_parameters * (tokens + hardware.overhead.rows)
    scores = 2 * shape.query_width * workload.row_tokens * tokens
    if workload.fused_attention:
        unfused, attention = 0.0, scores / (e.attention * flops)
    else:
        unfused, attention = 2 * scores / (e.matmul * flops), 0.0
    weights = products / (e.matmul * flops)
    traffic = 2 * activation_bytes(shape, at.layout, workload) * tokens
    memory = traffic / (e.memory * hardware.memory_bandwidth)
    group = network.tensor_group(hardware, at.layout)
    reduces = 2 * network.all_reduce(hardware, group, tokens * shape.hidden * workload.element)
    launch = hardware.overhead.layer
    forward = Cost(weights + unfused + attention, memory, reduces, launch)
    compute = at.backward_products * weights + 2 * unfused + 2.5 * attention
    return forward, Cost(compute, 2 * memory, reduces, 2 * launch)


def head(at: Setting, rows: int) -> tuple[Cost, Cost]:
    """Costs of the head's forward and backward pass: its product, and three passes over float32 logits."""
    hardware, shape, t = at.hardware, at.shape, at.layout.t
    tokens, e = rows * at.workload.row_tokens, hardware.efficiency
    product = 2 * shape.head_parameters * tokens / (t * e.matmul * hardware.peak_flops)
    logits = 4 * tokens * (shape.vocab / t if shape.head == "lm" else 1)
    memory = 3 * logits / (e.memory * hardware.memory_bandwidth)
    return Cost(product, memory), Cost(at.backward_products * product, memory)


def stage_layers(shape: ModelShape, layout: ParallelLayout) -> int:
    """Layers of the longest pipeline stage."""
    return -(-shape.layers // layout.p)


def device_parameters(shape: ModelShape, layout: ParallelLayout) -> float:
    """Parameters of the fullest device: layers of a stage and the embedding or head, over tensor shards."""
    if layout.p == 1:
        return shape.num_parameters / layout.t
    ends = max(shape.vocab * shape.hidden, shape.head_parameters)
    return (stage_layers(shape, layout) * shape.layer_parameters + ends + shape.hidden) / layout.t


def trained_parameters(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> float:
    """Parameters of the fullest device that learn: all of them, or those of adapters."""
    count = device_parameters(shape, layout)
    if not workload.lora_rank:
        return count
    return count * shape.adapter_parameters(workload.lora_rank) / shape.num_parameters
