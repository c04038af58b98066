"""The layers of a stage: Megatron's, with the norm, attention and rotary angles of a Hugging Face model.

T is the number of tokens of a micro-batch, H heads of this rank, K key-value heads, D the size of a head.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from rlhf_lightning.engines.megatron.tokens import Tokens
from rlhf_lightning.engines.packed.layer import Layer, window_of


class Norm(LlamaRMSNorm):
    """The RMSNorm of transformers (Zhang and Sennrich 2019, eq. 4), built as Megatron builds its layers."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # With sequence parallelism each tensor rank sees its own tokens, and Megatron sums the gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedAttention(nn.Module):
    """Attention over packed sequences, with the kernels of `engines.packed`."""

    def __init__(
        self,
        *,
        number: int,
        window: int,
        config: TransformerConfig,
        **unused: object,
    ) -> None:
        super().__init__()
        self._layer = Layer(number, scaling=config.kv_channels**-0.5, window=window)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Tokens,
        **unused: object,
    ) -> Tensor:
        """[T, 1, H, D], [T, 1, K, D] twice -> [T, 1, H D]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        assert packed_seq_params.sequences is not None
        attended = packed_seq_params.sequences.attend(q, k, v, self._layer)
        return attended.flatten(2).transpose(0, 1)


class Frequencies(nn.Module):
    """The angles by which Megatron rotates queries and keys, scaled as the model's configuration says."""

    def __init__(self, config: PreTrainedConfig, device: torch.device) -> None:
        super().__init__()
        # Llama's module computes Qwen2's frequencies too.
        self._inverse = LlamaRotaryEmbedding(cast(LlamaConfig, config)).inv_freq.to(device)

    def forward(self, position_ids: Tensor) -> Tensor:
        """[1, T] -> [T, 1, 1, D] float32, both halves of D equal."""
        angles = position_ids[0, :, None] * self._inverse
        return torch.cat([angles, angles], -1)[:, None, None]


def layers(config: PreTrainedConfig, numbers: tuple[int, ...]) -> TransformerBlockSubmodules:
    """Megatron's description of these layers, and of the norm after the last of all."""
    return TransformerBlockSubmodules(
        layer_specs=[_layer(number, window_of(config, number)) for number in numbers], layer_norm=Norm
    )


def _layer(number: int, window: int) -> ModuleSpec:
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=partial(PackedAttention, number=number, window=window),
        linear_proj=RowParallelLinear,
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=Norm,
        mlp=ModuleSpec(
            module=MLP,
            submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        ),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)
