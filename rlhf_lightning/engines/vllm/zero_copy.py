"""Lets vLLM compute in the memory of a generation shard, of which the training parameters are views.

The rows of Megatron's fused matrices are in another order than vLLM's. The weights stay as they are, and the
outputs of these layers are reordered:

    linear_qkv -> [q q k v | q q k v]   group by group      reordered: [q q q q | k k | v v]
    linear_fc1 -> [gate up | gate up]   chunk by chunk      reordered: [gate gate | up up]

T is the number of tokens, G of groups (key-value heads) of this rank, Q of query heads in each, D the size of
a head, F the inner size of this rank, k the number of training shards in a generation shard.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rlhf_lightning.engines.conversion import Conversion
from rlhf_lightning.engines.training import Shard

_FUSED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
"""The first Hugging Face part of a fused matrix -> vLLM's name of the matrix."""


class ZeroCopyWeights:
    """The parameters of vLLM's model, which have memory only while a shard is attached.

    Args:
        model: of vLLM; the memory of its own weights is freed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._parameters = model, dict(model.named_parameters())
        self._fits = False
        self.detach()

    def attach(self, shard: Shard) -> None:
        """Compute with the tensors of a shard until `detach`."""
        if not self._fits:
            self._fit(shard)
        for name, tensor in shard.tensors.items():
            self._parameters[_name(shard.conversion, name)].data = tensor

    def detach(self) -> None:
        """Drop the shard's tensors."""
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)

    def _fit(self, shard: Shard) -> None:
        """Make the model's layers compute with the shard's order and padding; once."""
        conversion = shard.conversion
        names = {_name(conversion, param.name) for param in conversion.parameters}
        assert names == self._parameters.keys()
        for name, module in self._model.named_modules():
            if isinstance(module, VocabParallelEmbedding):
                _repad(module, conversion.vocabulary)
            elif name.endswith("qkv_proj"):
                queries = conversion.heads // conversion.groups
                module.register_forward_hook(_ordering(_by_kind(queries, conversion.head_size)))
            elif name.endswith("gate_up_proj") and shard.chunks > 1:
                module.register_forward_hook(_ordering(_by_half(shard.chunks)))
        self._fits = True


def _name(conversion: Conversion, name: str) -> str:
    """VLLM's name of a Megatron parameter."""
    first = conversion.names(name)[0]
    for part, whole in _FUSED.items():
        first = first.replace(f".{part}.", f".{whole}.")
    return first


def _ordering(order: Callable[[Tensor], Tensor]) -> Callable[..., object]:
    def hook(module: nn.Module, given: object, output: tuple[Tensor, object]) -> tuple[Tensor, object]:
        return order(output[0]), output[1]

    return hook


def _by_kind(queries: int, size: int) -> Callable[[Tensor], Tensor]:
    """Reorder [T, G (Q + 2) D] from group by group to all queries, all keys, all values."""

    def order(fused: Tensor) -> Tensor:
        mixed = torch.unflatten(fused, -1, (-1, queries + 2, size))
        kinds = mixed.split([queries, 1, 1], dim=-2)
        return torch.cat([kind.flatten(-3) for kind in kinds], dim=-1)

    return order


def _by_half(chunks: int) -> Callable[[Tensor], Tensor]:
    """Reorder [T, 2 F] from k chunks of gate and up to all of gate, all of up."""

    def order(fused: Tensor) -> Tensor:
        return torch.unflatten(fused, -1, (chunks, 2, -1)).transpose(-3, -2).flatten(-3)

    return order


def _repad(layer: VocabParallelEmbedding, vocabulary: int) -> None:
    """Make an embedding or output layer take a vocabulary padded to `vocabulary`, not to a multiple of 64."""
    layer.shard_indices = layer._get_indices(
        vocabulary, vocabulary, layer.num_embeddings, layer.org_vocab_size, layer.tp_rank, layer.tp_size
    )
