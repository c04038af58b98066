"""What the attention functions need to know about a layer."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedConfig


class Layer(NamedTuple):
    """One of a model's attention layers."""

    number: int
    """Its index in the model, from 0."""
    scaling: float
    """Factor of the products of queries and keys."""
    window: int
    """A token attends to at most so many tokens, itself included; 0: to all before it."""


def window_of(config: PreTrainedConfig, number: int) -> int:
    """The `Layer.window` of a layer, by the configuration of a Llama or Qwen2."""
    types = getattr(config, "layer_types", None) or ()
    return int(config.sliding_window) if types and types[number] == "sliding_attention" else 0
