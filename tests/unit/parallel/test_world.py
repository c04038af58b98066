"""The world of one device."""

from __future__ import annotations

from datetime import timedelta

import torch

from rlhf_lightning.parallel import World, WorldSpec


def test_every_group_waits_as_long_as_the_world() -> None:
    world = World.join(0, WorldSpec(size=1, address="", groups=((0,),), timeout_s=77.0), gpu=False)
    try:
        group = world.groups[0,]
        assert group is not None
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    finally:
        World.leave()
