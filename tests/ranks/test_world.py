"""What a process keeps once it has joined the world, and how those of its groups meet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rlhf_lightning.controller import WorkerError
from rlhf_lightning.controller.device import Device
from rlhf_lightning.parallel import World, WorldSpec
from tests.unit import spmd

RECORDER = "TORCH_FR_BUFFER_SIZE"
GROUPS = ((1, 2), (2,), (0, 1), (0, 2), (0, 1, 2))
"""Of three ranks, each pair of which is in a group."""


@pytest.mark.parametrize(("given", "kept"), [(None, 0), ("2000", 1)])
def test_collectives_of_gloo_are_kept_for_nobody_unless_asked_for(given: str | None, kept: int) -> None:
    code = (
        "import pickle, torch, torch.distributed as dist\n"
        "from rlhf_lightning.parallel import World, WorldSpec\n"
        "world = World.join(0, WorldSpec(size=1, address='', groups=((0,),), timeout_s=77.0), gpu=False)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "print(len(pickle.loads(torch._C._distributed_c10d._dump_fr_trace())['entries']))\n"
        "world.leave()\n"  # gloo's threads may still hold the tensor: to free it as Python ends is to abort
    )
    variables = {name: value for name, value in os.environ.items() if name != RECORDER}
    variables |= {RECORDER: given} if given else {}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert int(done.stdout) == kept


def met(_: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """Ranks of the groups that communicate, one after the other."""
    groups: dict[tuple[int, ...], dist.ProcessGroup | None]
    groups = {ranks: dist.new_group(list(ranks)) for ranks in GROUPS}
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as made:
        World(dist.get_rank(), torch.device("cpu"), groups).meet()
    return [tuple(dist.get_process_group_ranks(call.kwargs["group"])) for call in made.call_args_list]


def test_groups_of_several_ranks_meet_in_an_order_that_all_ranks_share() -> None:
    for rank, found in enumerate(spmd.run(3, met)):
        assert found == [ranks for ranks in GROUPS if rank in ranks and len(ranks) > 1]


@pytest.mark.parametrize("spans", [False, True])
def test_a_device_that_does_not_reach_the_others_is_named(*, spans: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    device = Device(1, gpu=False)
    device.node = "b"
    said = r"^device 1 on node b: cannot join the world of 2 devices: "
    with pytest.raises(WorkerError, match=said) as error:
        device.join(WorldSpec(2, address, (), 1.0, spans_nodes=spans), torch.get_num_threads())
    assert ("GLOO_SOCKET_IFNAME" in str(error.value)) is spans
