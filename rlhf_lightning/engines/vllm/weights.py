"""Which model vLLM makes, and what it must be given: it says nothing of a weight too large, or missing."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf_lightning.engines.huggingface.models import empty_model, read_config
from rlhf_lightning.engines.huggingface.sizes import original_positions
from rlhf_lightning.spec import ModelSpec


def as_trained(model: ModelSpec) -> dict[str, object]:
    """What vLLM is to read in config.json, so that it computes the model that transformers trains.

    transformers chooses the class by `model_type`, and finds the original length of LongRoPE within
    `rope_parameters` too; vLLM chooses by `architectures`, and would take the long factors for all rows.
    """
    kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[read_config(model).model_type]
    known: dict[str, object] = {"architectures": [kind]}
    original = original_positions(model)
    return known if original is None else known | {"original_max_position_embeddings": original}


def weight_shapes(model: ModelSpec) -> dict[str, torch.Size]:
    """The shape of every parameter by its Hugging Face name, with that of a tied output layer."""
    module = empty_model(read_config(model), "lm")
    return {name: weight.shape for name, weight in module.named_parameters(remove_duplicate=False)}


def needed(model: nn.Module) -> set[str]:
    """Names of what a model in vLLM must be given: its parameters, and its buffers that would be in files.

    vLLM fills both at random. Names that begin with an underscore are its own: scales of keys and values.
    """
    buffers = model.state_dict().keys() & dict(model.named_buffers()).keys()
    own = {name for name in buffers if name.rpartition(".")[2].startswith("_")}
    return dict(model.named_parameters()).keys() | buffers - own
