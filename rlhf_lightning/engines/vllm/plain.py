"""Keeps vLLM on a CPU from repacking weights, or packs them again, so that they can be updated and shared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import vllm._custom_ops as operations
from torch import nn
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from rlhf_lightning.environment import replaced


@contextmanager
def plain_weights() -> Iterator[None]:
    """Within this context, loading a model packs no matrices but experts for oneDNN or for vLLM's kernels."""
    kernel = {"check_cpu_sgl_kernel": lambda *_: False}
    with replaced(operations, {"_supports_onednn": False}), replaced(utils, kernel):
        yield


@contextmanager
def plain_experts(model: nn.Module) -> Iterator[None]:
    """Within this context experts on a CPU are to be written, all and plain; on exit they are packed.

    vLLM's kernel takes packed ones only. They have the memory of the plain ones, so an expert at a time is
    packed into its place.
    """
    packed = [
        (weight, layer.quant_method.moe_kernel.fused_experts.isa)
        for layer in model.modules()
        if isinstance(layer, RoutedExperts)
        for weight in (layer.w13_weight, layer.w2_weight)
        if weight.is_cpu
    ]
    for weight, _ in packed:
        weight.zero_()  # no one writes its padding, into which packing has moved other numbers
    yield
    for weight, isa in packed:
        for expert in weight.split(1):
            expert.copy_(operations.cpu_prepack_moe_weight(expert, isa))
