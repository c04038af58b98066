"""Several devices in this process, and the role of tests/ray on them: what Ray would carry, without Ray."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_lightning.controller import CallReport, WorkerGroup
from rlhf_lightning.controller.block import Block
from rlhf_lightning.controller.call import Call
from rlhf_lightning.controller.device import Device, Placement
from rlhf_lightning.controller.in_process import InProcessTransport
from rlhf_lightning.controller.register import Remote
from rlhf_lightning.controller.transport import Future, Submitted, Transport
from rlhf_lightning.parallel import ParallelLayout, World
from tests.ray.echo import Echo


class Devices(Transport):
    """A transport over `len(parts)` devices, each of which runs its calls here and now."""

    def __init__(self, num_devices: int) -> None:
        super().__init__()
        self.parts = [InProcessTransport(Device(rank)) for rank in range(num_devices)]

    def submit(self, device: int, call: Call, blocks: Sequence[Future | Block]) -> Submitted:
        return self.parts[device].submit(device, call, blocks)

    def fetch(self, futures: Sequence[Future]) -> list[object]:
        return [value for future in futures for value in future.transport.fetch([future])]

    def drain(self) -> list[CallReport]:
        return [report for part in self.parts for report in part.drain()]

    def close(self) -> None:
        for part in self.parts:
            part.close()


def host(device: Device, role: Remote, layout: ParallelLayout) -> None:
    """Build a role on a device whose collectives nobody calls."""
    groups = {tuple(ranks): None for axis in ("p", "t", "d") for ranks in layout.groups(axis)}
    device.world = World(device.rank, torch.device("cpu"), dict(groups))
    device.host("echo", Placement(role, layout, tuple(range(layout.num_ranks)), None))


def echo_on(layout: ParallelLayout) -> Echo:
    """The role, bound to one device for each rank of a layout."""
    devices = Devices(layout.num_ranks)
    for part in devices.parts:
        host(part.device, Echo(), layout)
    return Echo(WorkerGroup("echo", devices, layout, tuple(range(layout.num_ranks))))
