"""The world of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rlhf_lightning.parallel import ParallelLayout, World, WorldSpec

RECORDER = "TORCH_FR_BUFFER_SIZE"


def test_every_group_waits_as_long_as_the_world() -> None:
    world = World.join(0, WorldSpec(size=1, address="", groups=((0,),), timeout_s=77.0), gpu=False)
    try:
        group = world.groups[0,]
        assert group is not None
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    finally:
        World.leave()


@pytest.mark.parametrize(("given", "kept"), [(None, 0), ("2000", 1)])
def test_collectives_of_gloo_are_kept_for_nobody_unless_asked_for(given: str | None, kept: int) -> None:
    code = (
        "import pickle, torch, torch.distributed as dist\n"
        "from rlhf_lightning.parallel import World, WorldSpec\n"
        "World.join(0, WorldSpec(size=1, address='', groups=((0,),), timeout_s=77.0), gpu=False)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "print(len(pickle.loads(torch._C._distributed_c10d._dump_fr_trace())['entries']))\n"
    )
    variables = {name: value for name, value in os.environ.items() if name != RECORDER}
    variables |= {RECORDER: given} if given else {}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert int(done.stdout) == kept


def test_a_device_adds_up_gradients_with_those_that_hold_the_same_part() -> None:
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {
        ranks: mock.create_autospec(dist.ProcessGroup, instance=True) for ranks in ((2, 4), (3, 5))
    }
    devices = (2, 3, 4, 5)
    for rank in devices:
        world = World(rank, torch.device("cpu"), groups)
        seat = world.seat(ParallelLayout(t=2, d=2), devices)
        assert seat.rank == rank - 2
        assert seat.dp_group is groups[(2, 4) if rank in (2, 4) else (3, 5)]
        assert world.seat(ParallelLayout(t=4), devices).dp_group is None
