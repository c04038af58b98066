"""NCCL makes the communicators of a world's groups as its devices join, not at the first call in a run."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_lightning.parallel import World, WorldSpec
from rlhf_lightning.parallel.groups import meet
from tests.gpu import ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroupNCCL


def communicates(group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """Whether NCCL has made the communicator of a group."""
    assert isinstance(group, dist.ProcessGroup)
    return torch.tensor(cast("ProcessGroupNCCL", group._get_backend(device))._is_initialized())


def alone(device: torch.device) -> dict[str, Tensor]:
    """Of a group before its rank has met itself, and then."""
    group = dist.new_group([0])
    before = communicates(group, device)
    meet(group, device)
    return {"before": before, "after": communicates(group, device)}


def test_a_group_can_communicate_once_its_ranks_have_met(gpu: torch.device) -> None:
    (found,) = ranks.run(1, alone)
    assert not found["before"]
    assert found["after"]


def joined(device: torch.device, *, address: str) -> dict[str, Tensor]:
    """Of a device that joins a world in place of the one that it is in."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    every = tuple(range(size))
    world = World.join(rank, WorldSpec(size, address, (every, (0,)), timeout_s=120.0), gpu=True)
    return {"met": communicates(world.groups[every], device)}


def test_groups_can_communicate_once_their_devices_have_joined() -> None:
    ranks.need(2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert all(found["met"] for found in ranks.run(2, partial(joined, address=address)))
