"""The world of one device."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlhf_lightning.parallel import ParallelLayout, World, WorldSpec, subgroups
from rlhf_lightning.parallel.world import LINK_PATIENCE
from tests.unit.pretended import pretended


def test_every_group_waits_as_long_as_the_world() -> None:
    world = World.join(0, WorldSpec(size=1, address="", groups=((0,),), timeout_s=77.0), gpu=False)
    try:
        for group in (world.groups[0,], dist.group.WORLD):
            assert group is not None
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    finally:
        world.leave()


def test_collectives_of_gpus_wait_until_the_controller_has_named_the_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL ends a process that waits too long, without a word of what for."""
    waits: list[timedelta] = []

    def noted(*_: object, timeout: timedelta, **__: object) -> None:
        waits.append(timeout)

    monkeypatch.setattr(dist, "init_process_group", noted)
    monkeypatch.setattr(dist, "new_group", noted)
    spec = WorldSpec(size=3, address="", groups=((1, 2), (2, 1)), links=((1, 2),), timeout_s=77.0)
    with pretended():
        World.join(0, spec, gpu=True)
    assert waits == [timedelta(seconds=137), LINK_PATIENCE, timedelta(seconds=137)]


def test_the_world_of_someone_else_stays() -> None:
    """A script under torchrun, or a notebook, may train with Local and go on with its own collectives."""
    alone = WorldSpec(size=1, address="", groups=(), timeout_s=77.0)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        World.join(0, alone, gpu=False).leave()
        assert dist.is_initialized()
        with pytest.raises(ValueError, match=r"has a torch\.distributed process group, .*strategy colocated"):
            World.join(0, replace(alone, groups=((0,),)), gpu=False)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_world_that_could_not_be_joined_whole_is_left() -> None:
    """A later run of the same process would be told that it is someone else's."""
    with pytest.raises(ValueError, match="world size"):
        World.join(0, WorldSpec(size=1, address="", groups=((0, 1),), timeout_s=77.0), gpu=False)
    assert not dist.is_initialized()


def test_a_device_adds_up_gradients_with_those_that_hold_the_same_part() -> None:
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {
        ranks: mock.create_autospec(dist.ProcessGroup, instance=True) for ranks in ((2, 4), (3, 5))
    }
    devices = (2, 3, 4, 5)
    for rank in devices:
        world = World(rank, torch.device("cpu"), groups)
        seat = world.seat(ParallelLayout(t=2, d=2), devices)
        assert seat.rank == rank - 2
        assert seat.gives_output == (rank in (2, 4))
        assert seat.dp_group is groups[(2, 4) if rank in (2, 4) else (3, 5)]
        assert world.seat(ParallelLayout(t=4), devices).dp_group is None


def test_a_link_begins_at_its_first_device_and_has_ends_on_its_own_only() -> None:
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {
        (3, 1): mock.create_autospec(dist.ProcessGroup, instance=True)
    }
    link = World(1, torch.device("cpu"), groups).link((3, 1))
    assert link is not None
    assert (link.source, link.group) == (3, groups[3, 1])
    assert World(0, torch.device("cpu"), groups).link((3, 1)) is None
    assert World(1, torch.device("cpu"), groups).link((1, 3)) is None


def test_groups_of_several_devices_are_made_along_every_axis() -> None:
    assert subgroups(ParallelLayout(t=2, d=2), (2, 3, 6, 7)) == [(2, 6), (3, 7), (2, 3), (6, 7)]
    assert subgroups(ParallelLayout(p=2), (5, 4)) == [(5, 4)]
    assert subgroups(ParallelLayout(), (3,)) == []
