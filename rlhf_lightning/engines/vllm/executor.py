"""vLLM's executor in this process, with one worker, whose peers are the other ranks of its tensor group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InPlaceExecutor(UniProcExecutor):  # type: ignore[misc]
    """SPMD: every rank schedules the same rows in the same way, so schedules need not be sent."""

    def _distributed_args(self) -> tuple[str, int, int]:
        """Address of the world (initialised already), this rank in its group, index of the device."""
        return "env://", get_tp_group().rank_in_group, 0

    def determine_available_memory(self) -> list[int]:
        """Bytes for keys and values: the minimum over the ranks, which must have equally many blocks."""
        found = torch.tensor(super().determine_available_memory())
        if (group := get_tp_group()).world_size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group.cpu_group)
        return [int(found.min())]
