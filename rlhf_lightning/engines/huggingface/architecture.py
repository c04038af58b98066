"""Checks of a model's architecture before a run starts, without loading weights.

Does a checkpoint belong to it, can it have adapters, has it the right head, can ranks divide it?
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf_lightning.engines.checkpoint import check_files, read_state
from rlhf_lightning.engines.head import Head
from rlhf_lightning.engines.huggingface.adapter_files import HEAD, check_adapter_files
from rlhf_lightning.engines.huggingface.adapters import adapt, check_lora
from rlhf_lightning.engines.huggingface.models import empty_model, headless
from rlhf_lightning.engines.huggingface.source import (
    config_directory,
    config_source,
    is_fresh,
    on_hub,
    resolve,
    weight_files,
)
from rlhf_lightning.engines.huggingface.tensor_plan import check_plan
from rlhf_lightning.engines.packed.attention import ADVICE, try_first_layer, why_not_packed
from rlhf_lightning.engines.tensor_files import read_header
from rlhf_lightning.engines.train_config import naming_path
from rlhf_lightning.extras import import_extra
from rlhf_lightning.spec import ModelSpec


def check_checkpoint(spec: ModelSpec, head: Head, directory: Path) -> None:
    """Compare the names and shapes of a checkpoint's tensors with those of the model's architecture.

    Raises:
        ValueError: the checkpoint is damaged or incomplete, or of another model.
    """
    check_lora(directory, spec.lora)
    check_files(directory)
    weights = _meta_model(spec, head).named_parameters()
    read_state(directory, {f"model.{name}": p.shape for name, p in weights if p.requires_grad})


def check_adapters(spec: ModelSpec, head: Head) -> None:
    """Refuse adapters that the model cannot have; the model of a hub name is not looked at.

    Raises:
        ValueError: peft is not installed, the directory has no weights, or the model has no such layers.
    """
    if on_hub(spec):
        import_extra("peft", extra="lora", purpose="lora")
        if spec.lora is not None and spec.lora.path:
            check_adapter_files(spec.lora, spec.lora.target_modules)
        return
    directory = resolve(spec)
    if not weight_files(directory):
        raise ValueError(
            f"{directory}: holds a config.json without weights, and adapters add to weights that are there. "
            "Type a directory with weights, or leave lora out."
        )
    _meta_model(spec, head)


def check_head(spec: ModelSpec) -> None:
    """Refuse a family without heads, a head of several outputs, and weights without one that nothing trains.

    The weights of a hub name are looked at as they are loaded.

    Args:
        spec: of a model that computes one number per token.

    Raises:
        ValueError: transformers has no head for the model's family, the head has several outputs, or it or
            all weights are missing.
    """
    config = _known_config(spec)
    if config is not None and type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"path={spec.path}: a model of type {config.model_type}, for which transformers has no "
            "sequence classification, and so no head of one output. Type the path of a model of another "
            "family, such as Llama, Qwen2, Qwen3, Mistral or Gemma."
        )
    if not spec.weights_change and is_fresh(spec):
        raise ValueError(
            f"path={spec.path}: holds a config.json without weights, and a fresh model with a head, which "
            "nothing trains, would make its numbers up. Type the directory of a sequence-classification "
            "model with one output, such as `rlhf export` writes after --algo rewardmodel."
        )
    shapes = _headers(spec)
    head = next((names[HEAD] for names in shapes if HEAD in names), None)
    if shapes and head is None and not spec.weights_change:
        raise headless(spec)
    if head is not None and head[0] != 1:
        raise ValueError(
            f"path={spec.path}: is a classifier of {head[0]} classes ({HEAD} is {list(head)}). Type the "
            "directory of one with a single output."
        )


def check_language(spec: ModelSpec) -> None:
    """Refuse weights of a reward, cost or value model for a language model; those of a hub name pass."""
    if any(HEAD in names for names in _headers(spec)):
        raise ValueError(
            f"path={spec.path}: its weights have {HEAD}, the head of a reward, cost or value model. Type the "
            "directory of a language model."
        )


def check_packed(spec: ModelSpec, head: Head) -> None:
    """Refuse a model whose attention cannot take packed sequences; of a hub name, as far as it is known."""
    config = _known_config(spec)
    if config is None:
        return
    if reason := why_not_packed(config):
        raise ValueError(f"path={spec.path}: a model of type {config.model_type}, which {reason}. {ADVICE}")
    if reason := _refused(config.to_json_string(), cast(Path, config_directory(spec)), head):
        raise ValueError(f"path={spec.path}: a model of type {config.model_type}: {reason}")


@lru_cache(maxsize=8)
def _refused(_config: str, directory: Path, head: Head) -> str:
    """What the first layer of a model says to packed sequences; empty where it takes them.

    Args:
        _config: what config.json says, as it may have another model's by the next call.
        directory: where it is.
        head: of the model.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    if type(config) not in (
        MODEL_FOR_CAUSAL_LM_MAPPING if head == "lm" else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    ):
        return ""  # there is no such model, which other checks tell where it is to be built
    try:
        try_first_layer(empty_model(config, head))
    except ValueError as err:
        return str(err)
    return ""


def check_tensor_parallel(spec: ModelSpec, head: Head, t: int) -> None:
    """Refuse a model whose layers t tensor ranks of the FSDP engine cannot divide."""
    if t > 1:
        model = _meta_model(spec, head)
        with naming_path(spec):
            check_plan(model, t)


def _known_config(spec: ModelSpec) -> PreTrainedConfig | None:
    """The model's configuration; None where the hub does not give the name."""
    directory = config_directory(spec)
    return None if directory is None else AutoConfig.from_pretrained(directory, local_files_only=True)


def _headers(spec: ModelSpec) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of each weight file; empty for a hub name, which is not looked up."""
    return [] if on_hub(spec) else [read_header(file) for file in weight_files(resolve(spec))]


def _meta_model(spec: ModelSpec, head: Head) -> PreTrainedModel:
    """The model on the meta device, with adapters if the spec has any."""
    module = empty_model(AutoConfig.from_pretrained(config_source(spec), local_files_only=True), head)
    if spec.lora is not None:
        with torch.device("meta"):
            adapt(module, spec.lora, seed=0)
    return module
