"""The context in which one engine's Megatron code runs, so that several models can share a process.

Megatron's constructors take a ProcessGroupCollection, but some of its functions read globals of the module
parallel_state. Inside the context these are set for this engine; on exit they are restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.utils import GlobalMemoryBuffer

from rlhf_lightning.engines.megatron.cpu import on_the_host
from rlhf_lightning.environment import replaced
from rlhf_lightning.parallel.groups import ModelGroups


class Scope:
    """The global state that one model's Megatron code needs."""

    def __init__(self, groups: ModelGroups, *, device: torch.device) -> None:
        self.collection = _collection(groups)
        self._on_cpu = device.type == "cpu"
        self._globals = {
            "_TENSOR_MODEL_PARALLEL_GROUP": groups.tensor,
            "_DATA_PARALLEL_GROUP": groups.data,
        }

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within this context, Megatron code of this model may run."""
        host: AbstractContextManager[None] = on_the_host() if self._on_cpu else nullcontext()
        tracker = {"_CUDA_RNG_STATE_TRACKER": _NoRandomNumbers(), "_CUDA_RNG_STATE_TRACKER_INITIALIZED": True}
        # Sequence parallelism gathers tokens in it: what it takes is free while the model waits.
        shared = {**self._globals, "_GLOBAL_MEMORY_BUFFER": GlobalMemoryBuffer()}
        with replaced(parallel_state, shared), replaced(random, tracker), host:
            yield


class _NoRandomNumbers(random.CudaRNGStatesTracker):  # type: ignore[misc]
    """Replaces the generators of tensor ranks, which without dropout and fresh weights are not needed."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()


def _collection(groups: ModelGroups) -> ProcessGroupCollection:
    """The groups under Megatron's names; there is no context or expert parallelism."""
    return ProcessGroupCollection(
        tp=groups.tensor,
        pp=groups.pipeline,
        dp=groups.data,
        dp_cp=groups.data,
        embd=groups.ends,
        pos_embd=None,
        cp=groups.alone,
        ep=groups.alone,
    )
