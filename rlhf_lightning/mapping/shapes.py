"""The sizes of a decoder, from which its parameters, FLOP and bytes follow."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_lightning.parallel.sharding import indivisible
from rlhf_lightning.spec import EMBEDDED, EMBEDDED_DIRECTORY, EXPERTS, why_not_megatron

logger = logging.getLogger(__name__)

Head = Literal["lm", "scalar"]
"""Logits over the vocabulary, or one number per token."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer."""

    name: str
    """What the reports call it."""
    layers: int
    """Decoder layers."""
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width of the feed-forward layer."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    vocab: int
    """Tokens of the vocabulary."""
    head: Head = "lm"
    """What it computes for each token."""
    tied: bool = False
    """Whether the logits share the weights of the embedding."""
    head_dim: int = 0
    """Width of a head; 0: hidden / heads."""
    gated: bool = True
    """Three matrices in the feed-forward layer, as in Llama, rather than two, as in GPT."""
    qkv_bias: bool = False
    """Biases of queries, keys and values, as in Qwen2."""
    undivided: str = ""
    """Why the Megatron engine does not take it, so that it has neither shards nor stages; empty: it does."""

    @property
    def query_width(self) -> int:
        """Columns of the query projection."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of a layer's matrix products."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """All parameters of a layer."""
        bias = self.query_width + 2 * self.kv_width if self.qkv_bias else 0
        return self.layer_matrix_parameters + bias + 2 * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the product that follows the last layer, shared ones included."""
        return self.hidden * (self.vocab if self.head == "lm" else 1)

    @property
    def num_parameters(self) -> int:
        """All parameters, shared ones once."""
        head = 0 if self.tied and self.head == "lm" else self.head_parameters
        return self.layers * self.layer_parameters + self.hidden + self.vocab * self.hidden + head

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of adapters of all linear layers but the output layer (Hu 2021, section 4.1)."""
        attention = 2 * (2 * self.hidden + self.query_width + self.kv_width)
        return self.layers * rank * (attention + (3 if self.gated else 2) * (self.hidden + self.intermediate))

    def kv_bytes(self, *, tensor: int = 1, pipeline: int = 1, element: int = 2) -> float:
        """Bytes of the keys and values of one token on one of `tensor` x `pipeline` devices.

        Where there are more tensor shards than key-value heads, each shard holds a whole head.
        """
        share = max(self.kv_width / tensor, self.kv_width / self.kv_heads)
        return 2 * element * share * self.layers / pipeline

    def divides(self, tensor: int) -> bool:
        """Whether `tensor` devices can share each layer evenly, as Megatron-core wants it."""
        return not indivisible(
            tensor,
            heads=self.heads,
            groups=self.kv_heads,
            head_size=self.kv_width // self.kv_heads,
            inner=self.intermediate,
        )

    def with_head(self, head: Head) -> ModelShape:
        """The same decoder with another head: a critic or a reward model of an actor's shape."""
        return dataclasses.replace(self, head=head)


def _llama(name: str, *, layers: int, hidden: int, intermediate: int, heads: tuple[int, int]) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, intermediate=intermediate, heads=heads[0],
        kv_heads=heads[1], vocab=32000,
    )  # fmt: skip


KNOWN = {
    shape.name: shape
    for shape in (
        _llama("llama-7b", layers=32, hidden=4096, intermediate=11008, heads=(32, 32)),
        _llama("llama-13b", layers=40, hidden=5120, intermediate=13824, heads=(40, 40)),
        _llama("llama-34b", layers=48, hidden=8192, intermediate=22016, heads=(64, 8)),
        _llama("llama-70b", layers=80, hidden=8192, intermediate=28672, heads=(64, 8)),
    )
}
"""Shapes by name: Llama 1 and 2, and Code Llama for 34B."""


def load(source: str, *, head: str = "lm") -> ModelShape:
    """The shape of a known name, of `embedded`, or of a Hugging Face config.json or its directory.

    Args:
        source: where the sizes are.
        head: `lm`, or any other head of a role: all of these give one number a token.

    Raises:
        ValueError: neither a known name nor a file, or not the config of a dense decoder.
    """
    computes: Head = "lm" if head == "lm" else "scalar"
    if source in KNOWN:
        return KNOWN[source].with_head(computes)
    path = EMBEDDED_DIRECTORY if source == EMBEDDED else Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"model={source!r}: neither a config.json, nor a directory with one, nor one of "
            f"{', '.join((*KNOWN, EMBEDDED))}. Try one of these, or download the model first."
        )
    return dataclasses.replace(_read(path), name=source, head=computes)


_GATED = (
    "cohere", "cohere2", "gemma", "gemma2", "gemma3", "gemma3_text", "granite", "llama", "mistral", "olmo",
    "olmo2", "phi3", "qwen2", "qwen3", "smollm3", "stablelm",
)  # fmt: skip
"""Families whose feed-forward layers have three matrices."""
_PLAIN = ("gpt2", "gpt_neox", "opt", "phi", "starcoder2")
"""Those that have two."""
_TIED = ("cohere", "cohere2", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "opt", "starcoder2")
"""Families whose input and output embeddings are one where their config.json says nothing."""


def _config(path: Path) -> dict[str, Any]:
    """The part of a config.json that describes the text model.

    Raises:
        ValueError: it is none.
    """
    try:
        whole = json.loads(path.read_text())
    except ValueError as err:
        raise ValueError(f"{path}: is not JSON ({err}).") from err
    text = whole.get("text_config", whole) if isinstance(whole, dict) else None
    if not isinstance(text, dict):
        raise ValueError(
            f"{path}: is not the config.json of a model: it holds no mapping. Give that of a decoder."
        )
    said = {key: whole[key] for key in ("model_type", "tie_word_embeddings") if key in whole}
    return {**said, **text}


def _read(path: Path) -> ModelShape:
    config = _config(path)
    if experts := next((key for key in EXPERTS if config.get(key)), ""):
        raise ValueError(f"{path}: {experts} says a mixture of experts. Only dense decoders are simulated.")

    def get(*keys: str) -> Any:  # noqa: ANN401
        for key in keys:
            if config.get(key) is not None:
                return config[key]
        raise ValueError(f"{path}: lacks {keys[0]}. Give the config.json of a decoder such as llama.")

    def number(*keys: str) -> int:
        value = get(*keys)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{path}: {keys[0]} is {value!r}, and has to be a whole number from 1 up.")
        return value

    def optional(default: int, *keys: str) -> int:
        return next((number(key) for key in keys if config.get(key)), default)

    family = str(config.get("model_type", "gpt2" if "n_embd" in config else "llama"))
    if family not in (*_GATED, *_PLAIN):
        logger.warning("%s: model_type %s is not known, and taken for one like llama", path, family)
    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    return ModelShape(
        name=str(path),
        layers=number("num_hidden_layers", "n_layer"),
        hidden=hidden,
        intermediate=optional(4 * hidden, "intermediate_size", "ffn_dim"),
        heads=heads,
        kv_heads=optional(heads, "num_key_value_heads"),
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family in _TIED)),
        head_dim=optional(0, "head_dim"),
        gated=family not in _PLAIN,
        qkv_bias=bool(config.get("attention_bias", family == "qwen2")),
        undivided=why_not_megatron(family, mlp_bias=bool(config.get("mlp_bias")), rope=_rope(config)),
    )


def _rope(config: Mapping[str, Any]) -> str:
    """The kind of rotary embedding; older files call its key `rope_scaling`, and `type` what it is."""
    said = config.get("rope_parameters") or config.get("rope_scaling")
    return str(said.get("rope_type", said.get("type", "default"))) if isinstance(said, dict) else "default"
