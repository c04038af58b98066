"""Ranks over which one copy of a model is divided compute on the same rows: otherwise numbers are wrong."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from tensordict import TensorDict

from rlhf_lightning.engines.packed.packing import COLUMNS
from rlhf_lightning.parallel.scope import need_all_ranks


def check_same_rows(rows: TensorDict, group: dist.ProcessGroup | None, *, device: torch.device) -> None:
    """Refuse rows whose prompts or responses are not those of the other ranks; collective.

    Args:
        rows: of this rank.
        group: the ranks that the copy of the model is divided over; None for one.
        device: of this rank.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    need_all_ranks("engine")
    mine = 0
    for name in COLUMNS:
        mine = zlib.crc32(rows[name].cpu().numpy().tobytes(), mine)
    seen = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=group)
    if int(seen.sum()):
        raise ValueError(
            "engine: the ranks that the model is divided over compute together, and were given different "
            "rows, as by transfer=MICRO_DP. Register the method with transfer=DP, which gives them the same."
        )
