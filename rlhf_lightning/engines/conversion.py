"""Converts Llama's and Qwen2's parameters between Hugging Face's names and layout and Megatron's.

    linear_qkv [G (Q + 2) D, H]   for each of G groups: Q query heads, one key head, one value head, D wide
    linear_fc1 [2 F, H]           gate, then up
    word_embeddings [V, H]        the vocabulary, padded with rows of 0

Megatron trains and saves by it, and `ShardedDecoder` generates by it. Moments of an optimizer are converted
like values.

G is the number of key-value heads, Q of query heads for each, D the size of a head, H the hidden size, F the
inner size, V the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rlhf_lightning.engines.head import Head
from rlhf_lightning.parallel.sharding import Place, Sharded

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_LAYER = "decoder.layers."
Read = Callable[[str], Tensor]
"""Returns the parameter with a Hugging Face name."""


class Conversion:
    """Converts names, shapes and values of one model, both ways.

    Args:
        config: of the Hugging Face model, a Llama or Qwen2 without biases in its MLPs.
        head: a language model's, or one number per token.
        vocabulary_multiple: the vocabulary is padded to a multiple of this.
    """

    def __init__(self, config: PreTrainedConfig, *, head: Head = "lm", vocabulary_multiple: int = 1) -> None:
        self.config, self.head = config, head
        self.tied = bool(config.tie_word_embeddings) and head == "lm"
        self.heads: int = config.num_attention_heads
        self.groups: int = config.num_key_value_heads
        self.head_size: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.vocabulary = -(-config.vocab_size // vocabulary_multiple) * vocabulary_multiple
        self.qkv_bias = config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))
        self.proj_bias = config.model_type == "llama" and bool(getattr(config, "attention_bias", False))

    @property
    def parameters(self) -> list[Sharded]:
        """All parameters of the whole model, in order; a tied embedding is one parameter, at both ends."""
        hidden, vocabulary = self.config.hidden_size, (self.vocabulary, self.config.hidden_size)
        found = [Sharded(EMBEDDING, vocabulary, "ends" if self.tied else "first", 0)]
        for layer in range(self.config.num_hidden_layers):
            found += self._layer(layer)
        found.append(Sharded("decoder.final_layernorm.weight", (hidden,), "last"))
        if self.head != "lm":
            found.append(Sharded(OUTPUT, (1, hidden), "last"))
        elif not self.tied:
            found.append(Sharded(OUTPUT, vocabulary, "last", 0))
        return found

    def _layer(self, layer: int) -> list[Sharded]:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        fused = (self.heads + 2 * self.groups) * self.head_size

        def add(name: str, *shape: int, dim: int | None = None, sections: tuple[int, ...] = ()) -> None:
            found.append(Sharded(f"{_LAYER}{layer}.{name}", shape, cast(Place, layer), dim, sections))

        found: list[Sharded] = []
        add("input_layernorm.weight", hidden)
        add("self_attention.linear_qkv.weight", fused, hidden, dim=0)
        if self.qkv_bias:
            add("self_attention.linear_qkv.bias", fused, dim=0)
        add("self_attention.linear_proj.weight", hidden, self.heads * self.head_size, dim=1)
        if self.proj_bias:
            add("self_attention.linear_proj.bias", hidden)
        add("pre_mlp_layernorm.weight", hidden)
        add("mlp.linear_fc1.weight", 2 * inner, hidden, dim=0, sections=(inner, inner))
        add("mlp.linear_fc2.weight", hidden, inner, dim=1)
        return found

    def names(self, name: str) -> tuple[str, ...]:
        """The Hugging Face names of the parameters that a Megatron parameter consists of, in order."""
        ends = {
            EMBEDDING: "model.embed_tokens.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
            OUTPUT: "lm_head.weight" if self.head == "lm" else "score.weight",
        }
        if name in ends:
            return (ends[name],)
        layer, _, rest = name.removeprefix(_LAYER).partition(".")
        part, _, kind = rest.rpartition(".")
        inside = {
            "input_layernorm": ("input_layernorm",),
            "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "self_attention.linear_proj": ("self_attn.o_proj",),
            "pre_mlp_layernorm": ("post_attention_layernorm",),
            "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.linear_fc2": ("mlp.down_proj",),
        }
        return tuple(f"model.layers.{layer}.{theirs}.{kind}" for theirs in inside[part])

    def from_hugging_face(self, param: Sharded, read: Read) -> Tensor:
        """A whole Megatron parameter from Hugging Face's."""
        parts = [read(name) for name in self.names(param.name)]
        if "linear_qkv" in param.name:
            grouped = [part.unflatten(0, (self.groups, -1)) for part in parts]
            return torch.cat(grouped, dim=1).flatten(0, 1)
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        missing = param.shape[0] - whole.shape[0]
        return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole

    def to_hugging_face(self, param: Sharded, whole: Tensor) -> dict[str, Tensor]:
        """Hugging Face's parameters, by name, from a whole Megatron parameter."""
        is_table = param.name == EMBEDDING or (param.name == OUTPUT and self.head == "lm")
        known = whole[: self.config.vocab_size] if is_table else whole
        return dict(zip(self.names(param.name), self.split(param.name, known), strict=True))

    def split(self, name: str, whole: Tensor, *, dim: int = 0) -> Sequence[Tensor]:
        """Split a parameter, or along `dim` outputs computed with it, into the parts that `names` lists."""
        if "linear_qkv" in name:
            per_group = whole.unflatten(dim, (self.groups, -1))
            queries = self.heads // self.groups * self.head_size
            parts = per_group.split([queries, self.head_size, self.head_size], dim=dim + 1)
            return [part.flatten(dim, dim + 1) for part in parts]
        return whole.chunk(len(self.names(name)), dim=dim)
