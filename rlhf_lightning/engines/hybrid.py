"""The 3D-HybridEngine of one rank (HybridFlow, section 5): trains in (p, t, d) and generates in (pg, tg).

train ── generating(): gather within the micro-DP group ──> a decoder over the generation shard
  ^                                                              │
  └──────── on exit: free the slices of other ranks ─────────────┘

By HybridFlow's rule the rank's training shard is a part of its generation shard, in the same memory, so it
exists once; by the vanilla rule (HybridFlow-V) the generation shard is cut out of the whole gathered model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from rlhf_lightning.engines.conversion import Conversion
from rlhf_lightning.engines.native.decoder import Decoder
from rlhf_lightning.engines.native.sharded import ShardedDecoder
from rlhf_lightning.engines.training import Shard, Transition
from rlhf_lightning.parallel import Seat
from rlhf_lightning.parallel.gathering import GatheredShard
from rlhf_lightning.parallel.transition import HybridBuffer
from rlhf_lightning.parallel.weights import generation_stages


class HybridEngine:
    """See the head of the module.

    Args:
        conversion: names and shapes of the whole model.
        stages: the layers of each training stage.
        seat: the rank's place; its layout has both the training and the generation sizes.
        parameters: the rank's training shards by `Sharded.name`; they are moved into one buffer.
    """

    def __init__(
        self,
        conversion: Conversion,
        stages: Sequence[Sequence[int]],
        *,
        seat: Seat,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        assert seat.groups is not None
        self._conversion, self._groups, self._device = conversion, seat.groups, seat.device
        self._generating = seat.layout.generating
        self._layers = generation_stages(stages, self._generating.p)
        whole = conversion.parameters, stages, seat.layout
        self._buffer = (
            HybridBuffer(*whole, rank=seat.rank, group=seat.groups.micro, parameters=parameters)
            if self._generating.rule == "hybridflow"
            else GatheredShard(*whole, rank=seat.rank, group=seat.groups.replica, parameters=parameters)
        )
        self.last = Transition()

    @contextmanager
    def lending(self) -> Iterator[Shard]:
        """Gather the generation shard, of which the training parameters are views.

        The borrower must drop it before the context ends; otherwise the memory of gathered slices stays.
        """
        before, started = self._buffer.size_bytes, time.perf_counter()
        shard = self._buffer.gather()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.last = Transition(
            seconds=time.perf_counter() - started,
            received_bytes=self._buffer.received_bytes,
            training_bytes=before,
            generation_bytes=self._buffer.size_bytes,
        )
        try:
            yield Shard(self._conversion, shard, self._generating.train.t // self._generating.t)
        finally:
            shard.clear()
            self._buffer.release()

    @contextmanager
    def generating(self) -> Iterator[Decoder]:
        """Gather the generation shard, as a decoder; all ranks of a copy make the same calls.

        The caller must drop it before the context ends, as for `lending`.
        """
        with self.lending() as shard:
            decoder = ShardedDecoder(
                self._conversion,
                shard.tensors,
                layers=self._layers,
                chunks=shard.chunks,
                tensor=self._groups.generation_tensor,
                pipeline=self._groups.generation_pipeline,
            )
            try:
                yield decoder
            finally:
                del decoder
