"""Gathers a model that ZeRO has sharded, for generation and for reading its weights.

training (stage 3)   d ranks hold 1/d of each parameter      generation   each rank holds all of them
                           └── bucket by bucket: all-gather -> the tensors of a plain module ──┘
In stages 1 and 2 every rank has the parameters already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_lightning.engines.deepspeed.scope import GatheredParameters, Scope, ZeroParamStatus
from rlhf_lightning.engines.fsdp.shards import filled, skeleton
from rlhf_lightning.parallel.shares import fitting_together


class Gathering:
    """Gives access to the whole parameters of a model.

    Args:
        model: on its device, before DeepSpeed shards it.
        scope: of the model.
        bucket: most numbers gathered at once; a larger parameter is gathered alone.
    """

    def __init__(self, model: PreTrainedModel, *, scope: Scope, bucket: int) -> None:
        self._skeleton, self._scope = skeleton(model), scope
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._sizes = {name: p.numel() for name, p in self._parameters.items()}
        names = list(self._sizes)
        self._buckets = [names[run] for run in fitting_together([*self._sizes.values()], bucket)]
        self.received_bytes = 0
        """Bytes that other ranks sent in the last `gathered`."""

    @contextmanager
    def gathered(self) -> Iterator[PreTrainedModel]:
        """A plain module without DeepSpeed's hooks, over whole tensors that are freed on exit."""
        self.received_bytes = 0
        with filled(self._skeleton, self.whole()) as module:
            yield module

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every whole parameter by name; gathered tensors are freed once the caller drops them."""
        for bucket in self._buckets:
            yield from self._gather(bucket).items()

    def _gather(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        parameters = {name: self._parameters[name] for name in names}
        divided = {name: p for name, p in parameters.items() if _is_divided(p)}
        self.received_bytes += sum(_theirs(p, self._sizes[name]) for name, p in divided.items())
        with self._scope.entered(), GatheredParameters(divided.values()):
            return {name: p.detach() for name, p in parameters.items()}


def _theirs(parameter: nn.Parameter, size: int) -> int:
    """Bytes of a sharded parameter that other ranks hold."""
    own: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    return (size - min(own.numel(), size)) * own.element_size()


def _is_divided(parameter: nn.Parameter) -> bool:
    """Whether a parameter is sharded: only in stage 3, and there not if it is small."""
    return bool(getattr(parameter, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE)
