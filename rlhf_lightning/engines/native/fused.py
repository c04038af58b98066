"""A Llama or Qwen2 that decodes in few large matrix products: `ShardedDecoder` over fused weight copies.

on a CPU    calls of few tokens use fused copies in oneDNN's layout; calls of many tokens use the Hugging Face
            module
on a GPU    all calls use fused copies, where there is memory for them

The copies are made at the start of each generation and freed at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from rlhf_lightning.engines.conversion import EMBEDDING, OUTPUT, Conversion
from rlhf_lightning.engines.host_linear import MANY_TOKENS, can_reorder, reordered
from rlhf_lightning.engines.native.decoder import WholeDecoder
from rlhf_lightning.engines.native.kv import Cached
from rlhf_lightning.engines.native.kv_gpu import free_bytes
from rlhf_lightning.engines.native.sharded import ShardedDecoder
from rlhf_lightning.engines.packed.record import Record
from rlhf_lightning.spec import why_not_megatron

_ROOM_FOR_CACHE = 3
"""A GPU must have room for the copies and, beside them, so many times the weights for keys and values."""


class FusedDecoder(WholeDecoder):
    """A model that `can_fuse` accepts.

    A step costs a tenth less than through its own layers on a CPU, and a third less on a GPU.
    """

    def __init__(self, module: PreTrainedModel, record: Record | None = None) -> None:
        super().__init__(module)
        self.record = record  # calls of many tokens are not recorded
        self._conversion = Conversion(module.config)
        self._steps: ShardedDecoder | None = None

    def __call__(
        self, ids: Tensor, places: Tensor, sequences: Cached, *, keep: Tensor | None = None
    ) -> Tensor | None:
        """See `Decoder.__call__`."""
        few = self._steps if len(ids) < MANY_TOKENS or ids.is_cuda else None
        compute = super().__call__ if few is None else few
        return compute(ids, places, sequences, keep=keep)

    @contextmanager
    def prepared(self, *, cache_bytes: int = 0) -> Iterator[None]:
        """See `Decoder.prepared`; fuses the module's present weights."""
        layers = range(self.module.config.num_hidden_layers)
        try:
            if self._has_room(cache_bytes):
                self._steps = ShardedDecoder(
                    self._conversion, self._fused(), layers=[layers], chunks=1, tensor=None, pipeline=None
                )
                self._steps.record = self.record
            yield
        finally:
            self._steps = None
            if self.record is not None:
                self.record.open = False

    def _has_room(self, cache_bytes: int) -> bool:
        """Whether a GPU has room for the copies beside keys and values; a CPU always has."""
        weights = list(self.module.parameters())
        if weights[0].is_cpu:
            return True
        size = sum(weight.nbytes for weight in weights)
        return size + max(cache_bytes, _ROOM_FOR_CACHE * size) <= free_bytes(weights[0].device)

    def _fused(self) -> dict[str, Tensor]:
        theirs = {name: p.detach() for name, p in self.module.named_parameters()}
        fused: dict[str, Tensor] = {}
        for param in self._conversion.parameters:
            weight = self._conversion.from_hugging_face(param, theirs.__getitem__)
            multiplied = weight.is_cpu and weight.dim() == 2 and param.name != EMBEDDING
            fused[param.name] = reordered(weight) if multiplied else weight
        if self._conversion.tied and fused[EMBEDDING].is_cpu:
            fused[OUTPUT] = reordered(fused[EMBEDDING])
        return fused


def can_fuse(module: PreTrainedModel) -> bool:
    """Whether a model is a Llama or Qwen2 whose parameters are whole, of one dtype, and have no adapters."""
    config = module.config
    mlp_bias = getattr(config, "mlp_bias", False)
    if why_not_megatron(config.model_type, mlp_bias=mlp_bias) or config.hidden_act != "silu":
        return False
    weights = dict(module.named_parameters())
    conversion = Conversion(config)
    names = [name for param in conversion.parameters for name in conversion.names(param.name)]
    plain = all(name in weights and weights[name].dtype == weights[names[0]].dtype for name in names)
    return plain and (weights[names[0]].is_cuda or can_reorder(weights[names[0]]))


def decoder_of(module: PreTrainedModel, record: Record | None = None) -> WholeDecoder:
    """The decoder of a module that `use_interface` has prepared; a `WholeDecoder` records nothing."""
    return FusedDecoder(module, record) if can_fuse(module) else WholeDecoder(module)
