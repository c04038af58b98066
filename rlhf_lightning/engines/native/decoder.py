"""The contract between the native generator and a model, which is whole on a rank or divided over several.

WholeDecoder     a Hugging Face module as it is
FusedDecoder     a Llama or Qwen2 on one rank, with fused weights               (`fused`)
ShardedDecoder   one rank's generation shard under Megatron's names, in place   (`sharded`)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf_lightning.engines.host_linear import reordered_weights
from rlhf_lightning.engines.native.kv import Cached
from rlhf_lightning.engines.native.rotary import has_static_angles
from rlhf_lightning.engines.packed.record import Record
from rlhf_lightning.spec import EXPERTS


class Drawn(NamedTuple):
    """The tokens drawn for n rows."""

    token: Tensor
    """[n] int64."""
    log_prob: Tensor
    """[n] float32, natural log, at the sampling temperature, before truncation."""


class Decoder(Protocol):
    """A causal language model, or one rank's part of it.

    All ranks of a copy make the same calls with the same arguments.
    """

    record: Record | None
    """Where matrix products are recorded for an update to reuse; None: they are not."""

    @property
    def config(self) -> PreTrainedConfig:
        """The whole model's configuration."""
        ...

    def __call__(
        self, ids: Tensor, places: Tensor, sequences: Cached, *, keep: Tensor | None = None
    ) -> Tensor | None:
        """Compute T tokens.

        Args:
            ids: [T] int64.
            places: [T] int64, their positions.
            sequences: decides what each token attends to, and caches keys and values.
            keep: [K] int64, the tokens whose logits are needed; None for all.

        Returns:
            The logits [K, V]; None on a rank that does not draw.
        """
        ...

    @property
    def capturable(self) -> bool:
        """Whether a step fits in a CUDA graph: the host waits neither for the GPU nor for another rank."""
        ...

    def kv_bytes_per_token(self, dtype: torch.dtype | None) -> int:
        """Bytes of one token's keys and values on this rank, if stored in `dtype`; None: the model's."""
        ...

    def prepared(self, *, cache_bytes: int = 0) -> AbstractContextManager[None]:
        """Within this context, weights are prepared for short steps.

        Args:
            cache_bytes: GPU memory that keys and values will need; 0: they take what is left.
        """
        ...

    def share(self, drawn: Drawn | None, count: int) -> Drawn:
        """Send the `count` tokens that one rank drew to every rank of the copy.

        Args:
            drawn: the tokens, on the rank that drew them; None on the others.
            count: number of tokens.
        """
        ...

    def least(self, number: int) -> int:
        """The smallest of the numbers that the ranks of the copy pass."""
        ...


class WholeDecoder:
    """A Hugging Face causal language model, prepared by `use_interface`, in evaluation mode, on one rank."""

    record: Record | None = None
    """See `Decoder.record`; only `FusedDecoder` has one."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module

    @property
    def capturable(self) -> bool:
        """See `Decoder.capturable`; of experts, most implementations wait for the GPU's choice."""
        config = self.config.get_text_config()
        return has_static_angles(config) and not any(getattr(config, name, None) for name in EXPERTS)

    @property
    def config(self) -> PreTrainedConfig:
        """See `Decoder.config`."""
        return self.module.config

    def __call__(
        self, ids: Tensor, places: Tensor, sequences: Cached, *, keep: Tensor | None = None
    ) -> Tensor | None:
        """See `Decoder.__call__`."""
        output = self.module(
            input_ids=ids[None],
            position_ids=places[None],
            use_cache=False,  # the sequences have a cache of their own
            sequences=sequences,
            logits_to_keep=0 if keep is None else keep,
        )
        return cast(Tensor, output.logits[0])

    def kv_bytes_per_token(self, dtype: torch.dtype | None) -> int:
        """See `Decoder.kv_bytes_per_token`."""
        text = self.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        if getattr(text, "kv_lora_rank", None):  # latent attention: `head_dim` counts what is rotated only
            heads, size = text.num_attention_heads, text.qk_nope_head_dim + text.qk_rope_head_dim
        both = size + (getattr(text, "v_head_dim", None) or size)
        element = (dtype or next(self.module.parameters()).dtype).itemsize
        return int(text.num_hidden_layers * heads * both * element)

    def share(self, drawn: Drawn | None, count: int) -> Drawn:
        """See `Decoder.share`; this rank is alone."""
        assert drawn is not None
        return drawn

    def least(self, number: int) -> int:
        """See `Decoder.least`; this rank is alone."""
        return number

    def prepared(self, *, cache_bytes: int = 0) -> AbstractContextManager[None]:
        """See `Decoder.prepared`."""
        del cache_bytes  # on a GPU no weights are copied
        return reordered_weights(self.module)
