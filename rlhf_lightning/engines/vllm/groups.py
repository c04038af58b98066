"""Gives vLLM the job's own process groups in place of those that it would make.

With t = 2 vLLM would make groups of the ranks 01 23 45 67. HybridFlow's may be 02 13 46 57, and the world may
have devices without vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.engine import core

from rlhf_lightning.environment import replaced

_ALONE = ("_ETP", "_DCP", "_PCP", "_PP", "_DP")


class _Coordinator(GroupCoordinator):  # type: ignore[misc]
    """vLLM's interface of a group, over an existing process group."""

    def __init__(
        self, group: dist.ProcessGroup, *, name: str, device: torch.device, talks: bool = False
    ) -> None:
        # The parent's constructor is not called: it makes new groups, with all ranks of the world.
        # The name is equal in all runs: vLLM keeps compiled models on disk, which ask for their group by it.
        self.unique_name = f"{name}:0"
        self.rank, self.ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        self.world_size, self.rank_in_group = len(self.ranks), self.ranks.index(self.rank)
        self.group_ranks, self.local_rank, self.device_index = [self.ranks], 0, 0
        self.cpu_group = self.device_group = group
        self.torch_distributed_backend = dist.get_backend(group)
        self.device, self.mq_broadcaster = device, None
        self._pending_isends: deque[object] = deque()
        self.use_custom_op_call = current_platform.use_custom_op_collectives()
        self.use_device_communicator, self.use_cpu_custom_send_recv = talks, False
        self.device_communicator = None
        if talks and self.world_size > 1:
            communicator = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())
            self.device_communicator = communicator(
                cpu_group=group, device=device, device_group=group, unique_name=self.unique_name
            )


def keeping_world() -> AbstractContextManager[None]:
    """Within this context, shutting down vLLM's core does not destroy the job's process groups."""
    return replaced(core, {"cleanup_dist_env_and_memory": lambda: None})


def drop_groups(model: nn.Module) -> None:
    """Take from a model the groups that it asked for the number of its ranks; they would outlive `close`."""
    for module in model.modules():
        vars(module).pop("ep_group", None)


class Groups:
    """The groups that vLLM needs on one rank.

    Args:
        tensor: ranks that generate with one copy of the model; None for one rank.
        device: of this rank.
    """

    def __init__(self, tensor: dist.ProcessGroup | None, *, device: torch.device) -> None:
        self._made_world = not dist.is_initialized()
        if self._made_world:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        self._alone = alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._whole = whole = dist.group.WORLD
        assert whole is not None
        one = _Coordinator(alone, name="rlhf_alone", device=device)
        world = _Coordinator(whole, name="rlhf_world", device=device)
        tensors = _Coordinator(tensor or alone, name="rlhf_tensor", device=device, talks=True)
        self._coordinators = [one, world, tensors]
        self._found: dict[str, object] = {**dict.fromkeys(_ALONE, one), "_WORLD": world, "_TP": tensors}
        # Read by mixtures of experts; experts are divided as other matrices, not among the ranks.
        self._found |= {"_EP": tensors, "_NODE_COUNT": 1}
        self.ranks: list[int] = tensors.ranks
        """Global ranks that generate with one copy of the model."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within this context vLLM uses these groups, also where it asks for one by its name."""
        with replaced(parallel_state, self._found):
            for coordinator in self._coordinators:
                parallel_state._register_group(coordinator)
            yield

    def close(self) -> None:
        """Destroy what was made here: the group of this rank alone, or the world if there was none.

        A run under `local` ends that world too, and an engine may end in the next run, which has another one.
        """
        for coordinator in self._coordinators:
            del coordinator.cpu_group, coordinator.device_group
        if dist.group.WORLD is self._whole:
            dist.destroy_process_group(None if self._made_world else self._alone)
        del self._alone, self._whole
