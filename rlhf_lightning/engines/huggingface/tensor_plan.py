"""Divides the layers of a decoder over tensor ranks in the FSDP engine, by transformers' plan for the model.

    colwise   q, k, v, gate, up [out / t, in]      each rank has some heads, some columns of the inner layer
    rowwise   o, down [out, in / t]                the ranks' outputs are summed
    words     embedding, output layer [V / t, H]   where t divides the vocabulary V; otherwise whole
    whole     norms, the head of a scalar model    on every tensor rank, with equal gradients
Norms of single heads (Qwen3) are whole too, but each rank sees its own heads only: gradients are summed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.functional import embedding
from transformers import PreTrainedConfig, PreTrainedModel

_STYLES: Mapping[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_SUMMED = "replicated_with_grad_allreduce"


def check_plan(model: PreTrainedModel, t: int) -> None:
    """Refuse a model that t tensor ranks cannot divide.

    Args:
        model: as transformers makes it, possibly on the meta device.
        t: number of tensor ranks.
    """
    if t == 1:
        return
    config: PreTrainedConfig = model.config.get_text_config()
    what, plan = f"strategy.settings.train.tensor={t} for model_type={config.model_type!r}", _plan(config)
    if unknown := sorted({style for style in plan.values() if style not in (*_STYLES, _SUMMED)}):
        raise ValueError(
            f"{what}: its plan divides layers as {', '.join(unknown)}, and the FSDP engine knows "
            f"{', '.join((*_STYLES, _SUMMED))}. Try tensor=1."
        )
    if "colwise" not in plan.values():
        raise ValueError(
            f"{what}: transformers has no plan that divides its layers. Try tensor=1, or a decoder such as "
            "llama, qwen2, qwen3 or mistral."
        )
    sizes = _sizes(config)
    if wrong := [f"the {size} {name}" for name, size in sizes.items() if size % t]:
        most = math.gcd(*sizes.values())
        fitting = [str(n) for n in range(1, most + 1) if most % n == 0]
        raise ValueError(f"{what}: {t} does not divide {' and '.join(wrong)}. Try {', '.join(fitting)}.")
    if left := _left_out(model, plan):
        raise ValueError(
            f"{what}: its plan leaves out {left}, which would see a part of a layer only. Try tensor=1."
        )


def _left_out(model: PreTrainedModel, plan: Mapping[str, str]) -> str:
    """A parameter in the same module as divided ones that is not in the plan; empty where there is none."""
    beside = {name.rpartition(".")[0] for name in plan}
    for name, _ in model.base_model.named_parameters():
        planned = any(fnmatch(name, f"{pattern}.*") for pattern in plan)
        if not planned and any(fnmatch(name, f"{pattern}.*") for pattern in beside):
            return name
    return ""


def divide(model: PreTrainedModel, mesh: DeviceMesh) -> frozenset[str]:
    """Divide the layers of a model, which is whole and equal on all ranks, in place.

    Returns:
        Names of whole parameters whose gradients must be summed over the ranks.
    """
    plan = _plan(model.config.get_text_config())
    decoder = model.base_model
    styles = {name: _STYLES[style]() for name, style in plan.items() if style in _STYLES}
    parallelize_module(decoder, mesh, styles, src_data_rank=None)
    prefix = "" if decoder is model else f"{model.base_model_prefix}."
    summed = [f"{prefix}{name}.*" for name, style in plan.items() if style == _SUMMED]
    _divide_vocabulary(model, mesh)
    names = [name for name, _ in model.named_parameters()]
    return frozenset(name for name in names if any(fnmatch(name, pattern) for pattern in summed))


def _divide_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide embedding and output layer by vocabulary, if it divides evenly; then logits are DTensors."""
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    if type(table) is not nn.Embedding or table.num_embeddings % mesh.size():
        return
    tied = output is not None and output.weight is table.weight
    parallelize_module(table, mesh, _VocabularyParallel(), src_data_rank=None)
    if output is not None:
        parallelize_module(output, mesh, ColwiseParallel(use_local_output=False), src_data_rank=None)
    if tied:
        output.weight = table.weight


class _VocabularyParallel(RowwiseParallel):
    """An embedding of which each rank has some words; torch's own allocates the whole gradient on each."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        self._partition_embedding_fn("", module, device_mesh)  # type: ignore[no-untyped-call]
        module.forward = partial(_embed, module, device_mesh)  # type: ignore[method-assign]
        return module


def _embed(module: nn.Embedding, mesh: DeviceMesh, ids: Tensor) -> Tensor:
    """The embeddings [..., H] of words [...], summed over ranks that know some words each."""
    assert isinstance(module.weight, DTensor)
    weight, padding = module.weight.to_local(), module.padding_idx
    first = mesh.get_local_rank() * len(weight)
    if padding is not None:
        padding = padding - first if first <= padding < first + len(weight) else None
    places = ids - first
    absent = (places < 0) | (places >= len(weight))
    found = embedding(places.masked_fill(absent, 0), weight, padding_idx=padding)
    parts = DTensor.from_local(found.masked_fill(absent[..., None], 0.0), mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def _plan(config: PreTrainedConfig) -> dict[str, str]:
    """How modules of the layers are divided: pattern of names in the decoder -> style."""
    plan: Mapping[str, str] = config.base_model_tp_plan or {}
    return {name: style for name, style in plan.items() if name.startswith("layers.")}


def _sizes(config: PreTrainedConfig) -> dict[str, int]:
    """The sizes that the number of tensor ranks must divide, by name."""
    heads: int = config.num_attention_heads
    inner: int | list[int] = config.intermediate_size
    return {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "columns of the feed-forward layers": math.gcd(*inner) if isinstance(inner, list) else inner,
    }
