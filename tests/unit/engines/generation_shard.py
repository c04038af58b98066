"""Cutting generation shards out of a whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_lightning.engines.conversion import Conversion, Read
from rlhf_lightning.parallel.layout import GenerationLayout
from rlhf_lightning.parallel.sharding import Sharded, holds


def generation_shard(
    conversion: Conversion,
    read: Read,
    *,
    layout: GenerationLayout,
    stages: Sequence[Sequence[int]],
    rank: int,
) -> dict[str, Tensor]:
    """What a rank generates with, by `Sharded.name`, in memory of its own.

    A parameter that is divided consists of the training shards of t / tg tensor ranks, one behind the other.
    One that is divided along dimension 1 is the transposed view of such a row of transposed shards.

    Args:
        conversion: of the model.
        read: gives its Hugging Face parameters by name.
        layout: of generation.
        stages: layers of each generation stage.
        rank: of the training layout.
    """
    at = layout.coordinate(rank)
    chunks = layout.train.t // layout.t
    mine = range(at.t * chunks, (at.t + 1) * chunks)
    with torch.no_grad():
        return {
            param.name: _joined(param, conversion.from_hugging_face(param, read), layout.train.t, mine)
            for param in conversion.parameters
            if holds(param, stages, at.p)
        }


def _joined(param: Sharded, whole: Tensor, t: int, indices: Sequence[int]) -> Tensor:
    if param.dim is None:
        return whole.clone()
    shards = [param.shard(whole, t, index) for index in indices]
    return torch.cat([shard.t() for shard in shards]).t() if param.dim == 1 else torch.cat(shards)
