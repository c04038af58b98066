"""The context in which one engine's DeepSpeed code runs, so that several models can share a process.

DeepSpeed keeps its process groups and its communication backend in module globals, reads its device from the
environment, and sometimes waits for all ranks of the job. Inside the context the globals are this engine's,
and "all ranks" are those that train its model; on exit everything is restored.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_lightning.environment import environment, for_deepspeed


@contextmanager
def _quiet(values: Mapping[str, str]) -> Iterator[None]:
    """Within this context, set environment variables, and let DeepSpeed log errors only."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with environment(values):
            yield
    finally:
        logger.setLevel(level)


with _quiet(for_deepspeed()):
    from deepspeed.comm import comm
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK as _ENTERED
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init, ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.utils import groups

__all__ = [
    "DeepSpeedConfig",
    "GatheredParameters",
    "Scope",
    "ZeROModule",
    "ZeroParamStatus",
    "free",
]

_BUILD = "build_shm_op"
_CACHED = "_PartitionedParameterCoordinator__params_to_release"
_MODULES: list[int] = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0]
"""How many modules have been numbered: one number for the whole process, in a default argument."""


class Scope:
    """The global state that one model's DeepSpeed code needs.

    Args:
        group: ranks that train the model, this one among them.
        device: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self.ranks = Ranks(group)
        self._environment = {"LOCAL_RANK": str(device.index or 0)}
        if device.type == "cpu":
            self._environment["LOCAL_SIZE"] = "1"  # otherwise it starts a process for every bucket, to count
        self._backend = _Backend(group, on_cpu=device.type == "cpu")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within this context, DeepSpeed code of this model may run."""
        before = comm.cdb, groups.mpu, Init.param_id, _MODULES[0]
        # Ranks must number a model's parameters and modules equally, and some may hold other models too.
        comm.cdb, groups.mpu, Init.param_id, _MODULES[0] = self._backend, self.ranks, 0, 0
        try:
            with _quiet(self._environment):
                yield
        finally:
            comm.cdb, groups.mpu, Init.param_id, _MODULES[0] = before


class Ranks:
    """DeepSpeed's "model parallel unit", for data parallelism only.

    Args:
        group: ranks that train the model.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The data-parallel ranks."""
        return self._group

    def get_data_parallel_world_size(self) -> int:
        """Number of data-parallel ranks."""
        return dist.get_world_size(self._group)

    def get_model_parallel_group(self) -> None:
        """None: there is no model parallelism."""

    def get_model_parallel_world_size(self) -> int:
        """One rank per copy of the model."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """The only one."""
        return 0


class ZeROModule(DeepSpeedEngine):  # type: ignore[misc]
    """A module trained by one of DeepSpeed's two ZeRO optimizers, also in bfloat16 at stage 1.

    For that case DeepSpeed has another optimizer, whose state `Masters` does not know.
    """

    def _broadcast_model(self) -> None:
        """Do nothing: every rank has loaded the same weights."""

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        return str(ZERO_OPTIMIZATION)


def free(module: ZeROModule, parameters: Iterable[nn.Parameter]) -> None:
    """Free the memory of a model, whose objects refer to each other in ways the garbage collector cannot see.

    Args:
        module: must not be called again.
        parameters: of the module.
    """
    zero, root = module.optimizer, module.module
    for holder in (*parameters, getattr(zero, "parameter_offload", None), zero, module):
        if holder is not None:
            vars(holder).clear()
    _ENTERED[:] = [entered for entered in _ENTERED if entered is not root]
    # A cache of the class, with modules as keys; other engines compute anew what they lose there.
    for cell in vars(PartitionedParameterCoordinator)[_CACHED].__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


class _Backend(TorchBackend):  # type: ignore[misc]
    """torch.distributed, except that calls without a group are for the ranks of one model."""

    def __init__(self, group: dist.ProcessGroup, *, on_cpu: bool) -> None:
        home = vars(sys.modules[TorchBackend.__module__])
        build = home[_BUILD]
        if on_cpu:  # it would compile for minutes an operation that only a whole job's ranks can use
            home[_BUILD] = lambda: None
        try:
            super().__init__(backend=None, timeout=None, init_method=None)
        finally:
            home[_BUILD] = build
        # By default it calls deprecated names, of which torch warns.
        self.all_gather_function = dist.all_gather_single
        self.reduce_scatter_function = dist.reduce_scatter_single
        self._model = group

    def get_rank(self, group: dist.ProcessGroup | None = None) -> int:
        return dist.get_rank(group or self._model)

    def get_world_size(self, group: dist.ProcessGroup | None = None) -> int:
        return dist.get_world_size(group or self._model)

    def broadcast(
        self, tensor: Tensor, src: int, *, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> dist.Work | None:
        if group is None:
            group, src = self._model, dist.get_global_rank(self._model, src)
        work: dist.Work | None = dist.broadcast(tensor, src, group=group, async_op=async_op)
        return work

    def barrier(
        self,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        device_ids: list[int] | None = None,
    ) -> dist.Work | None:
        chosen = group or self._model
        work: dist.Work | None = dist.barrier(group=chosen, async_op=async_op, device_ids=device_ids)
        return work
