"""A run of consecutive layers of a Hugging Face decoder as a Megatron module.

The first run has the embedding too, the last the final norm and the head.

T is the number of tokens of a micro-batch, K of those whose outputs are needed, H the hidden size.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers.activations import ACT2FN

from rlhf_lightning.engines.conversion import EMBEDDING, OUTPUT, Conversion
from rlhf_lightning.engines.megatron.config import Megatron
from rlhf_lightning.engines.megatron.parts import Frequencies, layers
from rlhf_lightning.engines.megatron.tokens import Padded, Tokens
from rlhf_lightning.engines.packed.packing import PackedRows
from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.parallel.sharding import Sharded

_LAYER = "decoder.layers."


def transformer_config(
    conversion: Conversion,
    layout: ParallelLayout,
    settings: Megatron,
    *,
    dtype: torch.dtype,
    device: torch.device,
    recompute: bool,
) -> TransformerConfig:
    """Megatron's configuration of the model, its layout and its training."""
    config, interleaved = conversion.config, settings.chunks > 1
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=conversion.heads,
        num_query_groups=conversion.groups,
        kv_channels=conversion.head_size,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        activation_func=ACT2FN[config.hidden_act],
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=conversion.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.t,
        pipeline_model_parallel_size=layout.p,
        virtual_pipeline_model_parallel_size=settings.chunks if interleaved else None,
        sequence_parallel=settings.sequence_parallel and layout.t > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - no experts; the default refuses the line above
        # With the opposite values an interleaved pipeline of two stages silently computes wrong gradients.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        calculate_per_token_loss=True,  # losses are divided already: Megatron only sums
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
    )


class Run(LanguageModule):  # type: ignore[misc]
    """Consecutive layers of a decoder, run `chunk` of its stage, with embedding or head if first or last."""

    def __init__(
        self,
        config: TransformerConfig,
        conversion: Conversion,
        numbers: tuple[int, ...],
        *,
        chunk: int,
        collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config, pg_collection=collection)
        source, self.numbers = conversion.config, numbers
        self._pad: int | None = source.pad_token_id
        self.vp_stage = chunk if config.virtual_pipeline_model_parallel_size else None
        self.pre_process = numbers[0] == 0
        self.post_process = numbers[-1] == source.num_hidden_layers - 1
        self.share_embeddings_and_output_weights = self.tied = conversion.tied
        self.model_type = ModelType.encoder_or_decoder
        if self.pre_process:
            self.embedding = self._embedding(conversion)
        self.decoder = self._decoder(conversion)
        self.frequencies = Frequencies(source, _device(config))
        if self.post_process:
            self.output_layer = self._head(conversion)
        self.setup_embeddings_and_output_layer()

    def forward(self, packed: PackedRows) -> Tensor:
        """Compute a micro-batch.

        Args:
            packed: its rows.

        Returns:
            Hidden states [T, 1, H], or with sequence parallelism a shard of them. After the last layer, for
            the kept tokens: logits of this rank's words [K, S], or numbers [K, 1].
        """
        share = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        missing = -packed.input_ids.shape[1] % share
        ids, places = (
            nn.functional.pad(x, (0, missing)) for x in (packed.input_ids, packed.sequences.position_ids)
        )
        sequences = Padded(packed.sequences, missing) if missing else packed.sequences
        hidden = self.decoder(
            hidden_states=self._embedded(ids) if self.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=self.frequencies(places),
            packed_seq_params=Tokens(qkv_format="sbhd", sequences=sequences),
        )
        if not self.post_process:
            return cast(Tensor, hidden)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        kept = hidden[packed.keep]
        if isinstance(self.output_layer, nn.Linear):
            return cast(Tensor, self.output_layer(kept)[:, 0])
        shared = self.embedding.word_embeddings.weight if self.pre_process and self.tied else None
        return cast(Tensor, self.output_layer(kept, weight=shared)[0][:, 0])

    def _embedded(self, ids: Tensor) -> Tensor:
        """[1, T] -> [T, 1, H], or a shard of it; the padding token has no gradient, as in Hugging Face."""
        hidden = cast(Tensor, self.embedding(input_ids=ids, position_ids=None))
        if self._pad is None:
            return hidden
        if self.config.sequence_parallel:
            ids = ids.chunk(self.pg_collection.tp.size(), dim=1)[self.pg_collection.tp.rank()]
        return torch.where((ids[0] == self._pad)[:, None, None], hidden.detach(), hidden)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Take the hidden states of the previous stage; Megatron's schedules call it."""
        self.decoder.set_input_tensor(input_tensor[0])

    def whole_name(self, name: str) -> str:
        """A parameter's name in the whole model; a tied output layer is the embedding."""
        if name == OUTPUT and self.tied:
            return EMBEDDING
        if not name.startswith(_LAYER):
            return name
        local, _, rest = name.removeprefix(_LAYER).partition(".")
        return f"{_LAYER}{self.numbers[int(local)]}.{rest}"

    def _decoder(self, conversion: Conversion) -> TransformerBlock:
        decoder = TransformerBlock(
            self.config,
            layers(conversion.config, self.numbers),
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=self.pg_collection,
            vp_stage=self.vp_stage,
        )
        # Biases of the attention's output alone: Megatron's option would add them to the MLPs too.
        for layer in decoder.layers if conversion.proj_bias else ():
            projection = layer.self_attention.linear_proj
            projection.bias = nn.Parameter(projection.weight.new_zeros(self.config.hidden_size))
            projection.bias.sequence_parallel = self.config.sequence_parallel
        return decoder

    def _embedding(self, conversion: Conversion) -> LanguageModelEmbedding:
        return LanguageModelEmbedding(
            self.config,
            conversion.vocabulary,
            conversion.config.max_position_embeddings,
            position_embedding_type="rope",
            tp_group=self.pg_collection.tp,
        )

    def _head(self, conversion: Conversion) -> nn.Module:
        config = self.config
        if conversion.head != "lm":
            where, dtype = _device(config), config.params_dtype
            return cast(
                nn.Linear,
                nn.utils.skip_init(nn.Linear, config.hidden_size, 1, bias=False, device=where, dtype=dtype),
            )
        # It computes the kept tokens, gathered before, on every tensor rank.
        whole = copy.copy(config)
        whole.sequence_parallel = False
        return cast(
            nn.Module,
            ColumnParallelLinear(
                config.hidden_size,
                conversion.vocabulary,
                config=whole,
                init_method=config.init_method,
                bias=False,
                skip_weight_param_allocation=self.pre_process and conversion.tied,
                tp_group=self.pg_collection.tp,
            ),
        )

    def _set_attention_backend(self) -> None:
        """Do nothing: Megatron would choose a kernel by environment variables, not `PackedAttention`."""


def mark(parameter: nn.Parameter, param: Sharded) -> None:
    """Tell Megatron that tensor ranks hold parts, not copies: their gradients all count in a norm."""
    if param.dim is not None and not getattr(parameter, "tensor_model_parallel", False):
        set_tensor_model_parallel_attributes(parameter, True, param.dim, 1)


def _device(config: TransformerConfig) -> torch.device:
    return torch.device("cpu" if config.use_cpu_initialization else "cuda")
