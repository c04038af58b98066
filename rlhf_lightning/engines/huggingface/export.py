"""Writes a model's directory straight from a checkpoint, with no more memory than its weights take."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_lightning.engines.checkpoint import CheckpointReader
from rlhf_lightning.engines.head import Head
from rlhf_lightning.engines.huggingface.models import empty_model, export_model, read_config
from rlhf_lightning.spec import ModelSpec


def export_checkpoint(checkpoint: Path, directory: Path, *, spec: ModelSpec, head: Head) -> bool:
    """Write a Hugging Face directory of the weights in a checkpoint, in the dtype of the computation.

    The files of the model that they began as are not read, so adapters and buffers, which the checkpoint does
    not hold, need an engine.

    Args:
        checkpoint: as an engine wrote it, of this model (`check_checkpoint`).
        directory: where to write.
        spec: of the model.
        head: of the model.

    Returns:
        Whether it could be written without an engine.
    """
    model = empty_model(read_config(spec), head)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if spec.lora is not None or model.state_dict().keys() - tied:
        return False
    dtype = getattr(torch, spec.computes_in)
    weights = {f"model.{name}": torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    CheckpointReader(checkpoint).fill(weights)
    named = {name: weights[f"model.{name}"] for name in shapes}
    export_model(directory, named, like=model, spec=spec)
    return True
