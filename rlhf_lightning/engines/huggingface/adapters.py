"""Low-rank adapters on the linear layers of a decoder, by peft (extra `lora`): added, merged, switched off.

plain     q_proj.weight
adapted   q_proj.base_layer.weight [out, in]        frozen
          q_proj.lora_A.default.weight [rank, in]   trained, drawn from init_seed
          q_proj.lora_B.default.weight [out, rank]  trained, 0 at first
merged    q_proj.weight = base_layer.weight + alpha / rank B A
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_lightning.engines.checkpoint import read_state
from rlhf_lightning.engines.dtensor import gather
from rlhf_lightning.engines.huggingface.adapter_files import (
    ADAPTER,
    FACTOR,
    is_factor,
    is_trained,
    load_adapters,
)
from rlhf_lightning.extras import import_extra
from rlhf_lightning.spec import LoRA

_BASE = ".base_layer."
_STATE = "lora"
"""Key of a checkpoint's state that holds the options of its adapters."""


def adapt(model: PreTrainedModel, lora: LoRA, *, seed: int) -> None:
    """Add adapters to a model in place, and freeze everything else but the head of a scalar model.

    Args:
        model: whole, on the host or on the meta device.
        lora: rank, scale and layers of the adapters, and the directory of those to begin with.
        seed: of the initial values of their factors A, where they are fresh.

    Raises:
        ValueError: peft is not installed, the model has no such layers, some are named as experts are, or
            the adapters to begin with are others than `lora` says.
    """
    peft = import_extra("peft", extra="lora", purpose="lora")
    targets = _targets(model, lora)
    _refuse_experts(model, targets)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        fan_in_fan_out=_stored_by_inputs(model),
    )
    with torch.random.fork_rng(devices=[]), _in_float32(model):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    assert _all_linear(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))
    if lora.path:
        load_adapters(model, lora)


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Within this context parameters are float32 and take no memory: peft draws factors in their dtype."""
    values = {parameter: parameter.data for parameter in model.parameters()}
    for parameter in values:
        parameter.data = torch.zeros((), device=parameter.device).expand_as(parameter)
    try:
        yield
    finally:
        for parameter, value in values.items():
            parameter.data = value


def _targets(model: PreTrainedModel, lora: LoRA) -> list[str]:
    """The last parts of the names of the layers to adapt: linear layers, without the output layer."""
    names = _names(model)
    if unknown := sorted(set(lora.target_modules) - names):
        raise ValueError(
            f"lora.target_modules: {type(model).__name__} has no linear layers called {unknown[0]!r} before "
            f"its output layer. It has {', '.join(sorted(names))}."
        )
    return sorted(lora.target_modules or names)


def _refuse_experts(model: PreTrainedModel, targets: list[str]) -> None:
    """Refuse names that experts have too, for which peft adapts the matrix that all experts are in."""
    peft = import_extra("peft", extra="lora", purpose="lora")
    conversion = import_extra("peft.utils.transformers_weight_conversion", extra="lora", purpose="lora")
    config = peft.LoraConfig(target_modules=[*_names(model)])  # all: of one matrix it takes all names or none
    conversion.convert_peft_config_for_transformers(config, model, None)
    kept: set[str] = config.target_modules
    if experts := sorted({*targets} - kept):
        raise ValueError(
            f"lora.target_modules: in {type(model).__name__} experts are called {', '.join(experts)} too, "
            "and peft adapts these in place of the layers so called. Type lora.target_modules "
            f"[{','.join(sorted({*targets} & kept or kept))}]."
        )


def _names(model: PreTrainedModel) -> set[str]:
    """The last parts of the names of all layers that may be adapted."""
    return {name.rpartition(".")[2] for name in _linear(model)}


def _all_linear(model: PreTrainedModel) -> bool:
    """Whether each adapter of a model adds to the weight of one layer, as `merged` does."""
    names = {name for name, _ in model.named_parameters()}
    return all(f"{name.partition(FACTOR)[0]}{_BASE}weight" in names for name in names if is_factor(name))


def _linear(model: PreTrainedModel) -> dict[str, nn.Module]:
    modules = model.base_model.named_modules()
    return {name: module for name, module in modules if isinstance(module, nn.Linear | Conv1D)}


def _stored_by_inputs(model: PreTrainedModel) -> bool:
    """Whether the weights of linear layers are [in, out], as in GPT-2."""
    return any(isinstance(module, Conv1D) for module in _linear(model).values())


def merged(
    model: PreTrainedModel, stored: Mapping[str, Tensor], lora: LoRA, *, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Gather an adapted model's parameters, merged into those of a plain model, one after the other, by name.

    Args:
        model: with adapters.
        stored: its parameters by name, whole or sharded, the trained ones in float32.
        lora: the adapters.
        dtype: of the result; sums are computed in float32, then cast.
    """
    by_inputs = _stored_by_inputs(model)
    for name, tensor in stored.items():
        if is_factor(name):
            continue
        weight = gather(tensor)
        layer, base, leaf = name.partition(_BASE)
        if base and leaf == "weight":
            a, b = (gather(stored[f"{layer}{FACTOR}{f}.{ADAPTER}.weight"]) for f in "AB")
            added = b.float() @ a.float() * lora.scale
            weight = weight.float() + (added.T if by_inputs else added)
        yield name.replace(_BASE, "."), weight.to(dtype)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within this context the base model computes, without adapters."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    # peft's own switch would also clear requires_grad, which FSDP2 reads in its first forward pass.
    for layer in layers:
        layer._disable_adapters = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # type: ignore[assignment]


def lora_state(lora: LoRA | None) -> dict[str, object]:
    """The options of adapters, as a part of a checkpoint's state."""
    return {} if lora is None else {_STATE: dataclasses.asdict(dataclasses.replace(lora, path=""))}


def saved_lora(directory: Path) -> LoRA | None:
    """The adapters of a checkpoint; None where it holds whole weights.

    Raises:
        ValueError: there is no complete checkpoint.
    """
    found = read_state(directory, {}).get(_STATE)
    return LoRA(**found) if isinstance(found, dict) else None


def check_lora(directory: Path, lora: LoRA | None) -> None:
    """Refuse a checkpoint of other adapters, or of whole weights for a model with adapters, or vice versa."""
    saved = saved_lora(directory)
    if saved != lora:
        raise ValueError(
            f"{directory}: was trained with lora={saved}, and this model has lora={lora}. Type the same lora "
            "options, or another checkpoint."
        )
