"""Decodes a Llama or Qwen2 with one rank's generation shard, in place, in Megatron's fused layout.

    stage 0 ── hidden states ──> stage 1 ── ... ──> last stage; its tensor rank 0 has logits, and draws
       ^                            ^                          |
       └──────── tokens ────────────┴──────────────────────────┘   to its tensor ranks, then to all stages
    tensor ranks of a stage sum the outputs of embedding, linear_proj and linear_fc2, and gather those of
    linear_qkv where there are more ranks than groups

Only one rank draws, so that rounding cannot make ranks of a copy disagree about a token or a row's end.

T is the number of tokens, H the hidden size, D the size of a head, G the number of groups (key-value heads)
of this rank, Q of query heads per group on this rank, F the inner size of this rank, k the number of training
shards in a generation shard, V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding, silu
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from rlhf_lightning.engines.conversion import EMBEDDING, OUTPUT, Conversion
from rlhf_lightning.engines.host_linear import product
from rlhf_lightning.engines.native.decoder import Drawn
from rlhf_lightning.engines.native.kv import Cached
from rlhf_lightning.engines.native.norm import Norm
from rlhf_lightning.engines.native.ranks import Ranks
from rlhf_lightning.engines.native.rotary import Angles, Rotary, has_static_angles
from rlhf_lightning.engines.packed.layer import Layer, window_of
from rlhf_lightning.engines.packed.record import Product, Record


class ShardedDecoder:
    """See the head of the module.

    Args:
        conversion: names and shapes of the whole model.
        weights: this rank's generation shard by `Sharded.name`, not copied. A tensor divided along dimension
            0 is the concatenation of its training shards, one divided along dimension 1 the transpose of such
            a concatenation. A tied output layer may be passed too, in another layout.
        layers: the layers of each generation stage; in an interleaved pipeline not consecutive.
        chunks: k.
        tensor: the tensor ranks of this stage; None for one.
        pipeline: the ranks of the stages, in order; None for one.
    """

    record: Record | None = None
    """See `Decoder.record`; only on one rank with all weights, in oneDNN's layout."""

    def __init__(
        self,
        conversion: Conversion,
        weights: Mapping[str, Tensor],
        *,
        layers: Sequence[Sequence[int]],
        chunks: int,
        tensor: dist.ProcessGroup | None,
        pipeline: dist.ProcessGroup | None,
    ) -> None:
        self._config, self._chunks = conversion.config, chunks
        self._tensor, self._pipeline = Ranks(tensor), Ranks(pipeline)
        stage = self._pipeline.index
        self._runs = _runs(layers)[stage]
        self._heads = _Heads(conversion, self._tensor)
        self._layers = {number: _Weights.of(weights, number) for number in layers[stage]}
        self._embedding, self._norm = weights.get(EMBEDDING), weights.get("decoder.final_layernorm.weight")
        self._output = weights.get(OUTPUT, self._embedding)
        some = next(iter(weights.values()))
        self._dtype, self._device = some.dtype, some.device
        self._rotary, self._norm_of = Rotary(self._config, self._device), Norm(self._config, some)
        self._activation = silu if self._config.hidden_act == "silu" else ACT2FN[self._config.hidden_act]
        self._attention = {
            n: Layer(n, self._heads.scaling, window_of(self._config, n)) for n in layers[stage]
        }

    @property
    def config(self) -> PreTrainedConfig:
        """See `Decoder.config`."""
        return self._config

    @property
    def capturable(self) -> bool:
        """See `Decoder.capturable`."""
        return self._tensor.size == self._pipeline.size == 1 and has_static_angles(self._config)

    def __call__(
        self, ids: Tensor, places: Tensor, sequences: Cached, *, keep: Tensor | None = None
    ) -> Tensor | None:
        """See `Decoder.__call__`; the logits are on tensor rank 0 of the last stage."""
        angles = self._rotary(places, self._dtype)
        for run in self._runs:
            hidden = self._first(ids) if run.source is None else self._received(len(ids), run.source)
            for number in run.layers:
                hidden = self._layer(hidden, number, angles, sequences)
            if run.target is not None:
                self._pipeline.send(hidden, run.target)
        if run.target is not None:
            return None
        logits = self._logits(hidden if keep is None else hidden[keep])
        if self.record is not None and logits is not None:
            self.record.finish(len(ids), logits, keep)
        return logits

    def kv_bytes_per_token(self, dtype: torch.dtype | None) -> int:
        """See `Decoder.kv_bytes_per_token`."""
        return 2 * len(self._layers) * self._heads.kept * (dtype or self._dtype).itemsize

    def share(self, drawn: Drawn | None, count: int) -> Drawn:
        """See `Decoder.share`."""
        if self._tensor.size == self._pipeline.size == 1 and drawn is not None:
            return drawn
        # Tokens and float32 log-probabilities are exact in float64, so one message carries both.
        if drawn is None:
            both = torch.empty(2, count, dtype=torch.float64, device=self._device)
        else:
            both = torch.stack([drawn.token.double(), drawn.log_prob.double()])
        if self._runs[-1].target is None:
            self._tensor.broadcast(both, source=0)
        self._pipeline.broadcast(both, source=self._pipeline.size - 1)
        return Drawn(both[0].long(), both[1].float())

    def least(self, number: int) -> int:
        """See `Decoder.least`."""
        return self._pipeline.least(self._tensor.least(number))

    def prepared(self, *, cache_bytes: int = 0) -> AbstractContextManager[None]:
        """Nothing to do: no weight is copied."""
        del cache_bytes
        return nullcontext()

    def _first(self, ids: Tensor) -> Tensor:
        """[T] -> [T, H], the embeddings of tokens; each tensor rank has those of some words."""
        table = _present(self._embedding)
        if self._tensor.size == 1:
            return embedding(ids, table)
        ids = ids - self._tensor.index * len(table)
        unknown = (ids < 0) | (ids >= len(table))
        found = embedding(ids.masked_fill(unknown, 0), table)
        return self._tensor.total(found.masked_fill_(unknown[:, None], 0))

    def _received(self, count: int, source: int) -> Tensor:
        """Receive the hidden states [T, H] of `count` tokens from another stage."""
        shape = (count, self._config.hidden_size)
        return self._pipeline.receive(torch.empty(shape, dtype=self._dtype, device=self._device), source)

    def _layer(self, hidden: Tensor, number: int, angles: Angles, sequences: Cached) -> Tensor:
        """[T, H] -> [T, H]; overwrites `hidden`."""
        weights = self._layers[number]
        fused = product(self._norm_of(hidden, weights.norm), weights.qkv, weights.qkv_bias)
        self._keep(number, "qkv", fused)
        parts = self._heads.split(fused, angles)
        attended = sequences.attend_by_token(*parts, self._attention[number])
        hidden = self._add(hidden, attended, weights.proj, weights.proj_bias, kept=(number, "proj"))
        fused = product(self._norm_of(hidden, weights.mlp_norm), weights.fc1)
        self._keep(number, "fc1", fused)
        gate, up = fused.view(len(fused), self._chunks, 2, -1).unbind(2)
        inner = self._activation(gate).mul_(up).flatten(1)
        return self._add(hidden, inner, weights.fc2, None, kept=(number, "fc2"))

    def _keep(self, number: int, name: Product, output: Tensor) -> None:
        if self.record is not None:
            self.record.keep(number, name, output)

    def _add(
        self, hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, kept: tuple[int, Product]
    ) -> Tensor:
        """`hidden` + the sum over tensor ranks of x weight^T, + bias; only rank 0 adds `hidden` and bias."""
        if self._tensor.index > 0:
            return self._tensor.total(product(x, weight))
        if weight.is_mkldnn:
            part = product(x, weight, bias)
            self._keep(*kept, part)
            return self._tensor.total(hidden.add_(part))
        hidden.addmm_(x, weight.t())
        return self._tensor.total(hidden if bias is None else hidden.add_(bias))

    def _logits(self, hidden: Tensor) -> Tensor | None:
        """[K, H] -> [K, V] on tensor rank 0, without the columns that pad the vocabulary."""
        part = product(self._norm_of(hidden, _present(self._norm)), _present(self._output))
        parts = self._tensor.gather(part)
        if parts is None:
            return None
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return whole[:, : self._config.vocab_size]


class _Run(NamedTuple):
    """Consecutive layers that a stage computes."""

    layers: tuple[int, ...]
    source: int | None
    """Stage that sends the hidden states; None: tokens are embedded here."""
    target: int | None
    """Stage that receives the hidden states; None: logits are computed here."""


class _Weights(NamedTuple):
    """The weights of one layer."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    proj: Tensor
    proj_bias: Tensor | None
    mlp_norm: Tensor
    fc1: Tensor
    fc2: Tensor

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], number: int) -> _Weights:
        """Look up the weights of layer `number` by their names."""
        prefix = f"decoder.layers.{number}."
        return cls(
            norm=weights[prefix + "input_layernorm.weight"],
            qkv=weights[prefix + "self_attention.linear_qkv.weight"],
            qkv_bias=weights.get(prefix + "self_attention.linear_qkv.bias"),
            proj=weights[prefix + "self_attention.linear_proj.weight"],
            proj_bias=weights.get(prefix + "self_attention.linear_proj.bias"),
            mlp_norm=weights[prefix + "pre_mlp_layernorm.weight"],
            fc1=weights[prefix + "mlp.linear_fc1.weight"],
            fc2=weights[prefix + "mlp.linear_fc2.weight"],
        )


class _Heads:
    """Selects this rank's heads; where there are more ranks than groups, several ranks share a group."""

    def __init__(self, conversion: Conversion, tensor: Ranks) -> None:
        heads, groups, t = conversion.heads, conversion.groups, tensor.size
        self.scaling = conversion.head_size**-0.5
        self._tensor, self._sharing = tensor, max(1, t // groups)
        self._shape = (heads // groups + 2, conversion.head_size)
        self.kept = max(1, groups // t) * conversion.head_size
        """Numbers in the cached keys of one token in one layer."""
        own = heads // groups // self._sharing
        self._queries = tensor.index % self._sharing * own, own

    def split(self, fused: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """[T, G (Q + 2) D] -> query [T, G, Q, D] and key [T, G, D], rotated, and value [T, G, D]."""
        if self._sharing > 1:
            fused = self._group(fused)
        mixed = fused.view(len(fused), -1, *self._shape)
        count = self._shape[0]
        turned = angles.turn(mixed.narrow(2, 0, count - 1))
        return turned.narrow(2, *self._queries), turned.select(2, count - 2), mixed.select(2, count - 1)

    def _group(self, fused: Tensor) -> Tensor:
        """Gather the group that this rank has a part of."""
        first = self._tensor.index // self._sharing * self._sharing
        return self._tensor.all_gather(fused)[first : first + self._sharing].transpose(0, 1).flatten(1)


def _present(weight: Tensor | None) -> Tensor:
    assert weight is not None
    return weight


def _runs(layers: Sequence[Sequence[int]]) -> list[list[_Run]]:
    """The runs of layers of each stage, in order."""
    owner = {number: stage for stage, numbers in enumerate(layers) for number in numbers}
    walk = [(stage, tuple(numbers)) for stage, numbers in groupby(range(len(owner)), owner.__getitem__)]
    around = [None, *(stage for stage, _ in walk), None]
    runs: list[list[_Run]] = [[] for _ in layers]
    for (stage, numbers), source, target in zip(walk, around[:-2], around[2:], strict=True):
        runs[stage].append(_Run(numbers, source, target))
    return runs
