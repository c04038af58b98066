"""Whether a checkpoint is of a model, without loading either."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_lightning.engines.checkpoint import read_state
from rlhf_lightning.engines.forward import Head
from rlhf_lightning.engines.source import resolve
from rlhf_lightning.spec import ModelSpec


def check_checkpoint(spec: ModelSpec, head: Head, directory: Path) -> None:
    """Compare the names and shapes of a checkpoint's tensors with those of the model's architecture.

    Raises:
        ValueError: the checkpoint is incomplete, or of another model.
    """
    config = AutoConfig.from_pretrained(resolve(spec), local_files_only=True)
    with torch.device("meta"):
        if head == "lm":
            module = AutoModelForCausalLM.from_config(config)
        else:
            config.num_labels = 1
            module = AutoModelForSequenceClassification.from_config(config)
    read_state(directory, {f"model.{name}": weight for name, weight in module.named_parameters()})
