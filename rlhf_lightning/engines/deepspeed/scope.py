"""Where one engine's DeepSpeed code runs: on its own ranks, whatever else is in the process.

DeepSpeed keeps its process groups and its connection in module globals, asks the environment for its device,
and waits now and then for all ranks of the job. Inside the context the globals are this engine's, and "all"
are the ranks that train its model; after it everything is what it was.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


@contextmanager
def _surroundings(values: Mapping[str, str]) -> Iterator[None]:
    """Other environment variables, and no word from DeepSpeed that is no error, until the context ends."""
    before, logger = dict(os.environ), logging.getLogger("DeepSpeed")
    level = logger.level
    try:
        os.environ.update(values)
        logger.setLevel(logging.ERROR)
        yield
    finally:
        logger.setLevel(level)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


# What it computes on is asked once in a process, as it is first imported.
with _surroundings({} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}):
    from deepspeed.comm import comm
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init, ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.utils import groups

__all__ = [
    "DeepSpeedConfig",
    "GatheredParameters",
    "Scope",
    "ZeROModule",
    "ZeroParamStatus",
    "let_go",
]

_BUILD = "build_shm_op"
_CACHED = "_PartitionedParameterCoordinator__params_to_release"


class Scope:
    """The surroundings of one model's DeepSpeed code.

    Args:
        group: ranks that train the model; one of them is this one.
        device: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self.ranks, self._numbered = Ranks(group), 0
        self._environment = {"LOCAL_RANK": str(device.index or 0)}
        if device.type == "cpu":
            self._environment["LOCAL_SIZE"] = "1"  # else it starts a process to count, for every bucket
        self._backend = _Backend(group, on_cpu=device.type == "cpu")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run DeepSpeed code of this model."""
        before = comm.cdb, groups.mpu, Init.param_id
        # Ranks compare the numbers of their parameters, and another model may have taken some on one of them.
        comm.cdb, groups.mpu, Init.param_id = self._backend, self.ranks, self._numbered
        try:
            with _surroundings(self._environment):
                yield
        finally:
            self._numbered = Init.param_id
            comm.cdb, groups.mpu, Init.param_id = before


class Ranks:
    """What DeepSpeed asks of a "model parallel unit": replicas only.

    Args:
        group: ranks that train the model.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The replicas."""
        return self._group

    def get_data_parallel_world_size(self) -> int:
        """How many replicas there are."""
        return dist.get_world_size(self._group)

    def get_data_parallel_rank(self) -> int:
        """Which of them this is."""
        return dist.get_rank(self._group)

    def get_model_parallel_group(self) -> None:
        """No replica is divided."""

    def get_model_parallel_world_size(self) -> int:
        """Ranks of a replica."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Which of them this is."""
        return 0


class ZeROModule(DeepSpeedEngine):  # type: ignore[misc]
    """A module trained by one of DeepSpeed's two ZeRO optimizers, in bfloat16 at stage 1 too.

    There DeepSpeed has an optimizer of its own, which takes no gradient of 0 or without a number.
    """

    def _broadcast_model(self) -> None:
        """Every rank has loaded the same."""

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        return str(ZERO_OPTIMIZATION)


def let_go(module: ZeROModule, parameters: Iterable[nn.Parameter]) -> None:
    """Free what a model holds; its objects hold each other where no garbage collector sees it.

    Args:
        module: that nobody will call again.
        parameters: of it.
    """
    zero = module.optimizer
    for hook in zero._grad_acc_hooks:
        hook.remove()
    for holder in (*parameters, getattr(zero, "parameter_offload", None), zero, module):
        if holder is not None:
            vars(holder).clear()
    # A cache of the class, with modules in its keys; what other engines lose there they compute again.
    for cell in vars(PartitionedParameterCoordinator)[_CACHED].__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


class _Backend(TorchBackend):  # type: ignore[misc]
    """torch.distributed, where "all ranks" are those of one model: without a group, theirs is meant."""

    def __init__(self, group: dist.ProcessGroup, *, on_cpu: bool) -> None:
        home = vars(sys.modules[TorchBackend.__module__])
        build = home[_BUILD]
        if on_cpu:  # it would compile, for minutes, what only serves ranks that are all of a job
            home[_BUILD] = _nothing
        try:
            super().__init__(backend=None, timeout=None, init_method=None)
        finally:
            home[_BUILD] = build
        # By default it calls them by names that torch warns of.
        self.all_gather_function, self.reduce_scatter_function = (
            dist.all_gather_single,
            dist.reduce_scatter_single,
        )
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
        wanted = self._model if group in (None, dist.group.WORLD) else group
        work: dist.Work | None = dist.barrier(group=wanted, async_op=async_op, device_ids=device_ids)
        return work


def _nothing() -> None:
    pass
