"""vLLM's executor in this very process: one worker, whose peers are the other ranks of its group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InPlaceExecutor(UniProcExecutor):  # type: ignore[misc]
    """SPMD: every rank schedules the same rows alike, so that they need not talk about it."""

    def _distributed_args(self) -> tuple[str, int, int]:
        """Where the world is (it has been joined), the rank in the group, and the device's number."""
        return "env://", get_tp_group().rank_in_group, 0

    def determine_available_memory(self) -> list[int]:
        """Bytes for keys and values: the least of all ranks, since all have as many blocks."""
        found = torch.tensor(super().determine_available_memory())
        if (group := get_tp_group()).world_size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group.cpu_group)
        return [int(found.min())]
