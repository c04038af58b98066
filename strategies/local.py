"""All models in this very process: a debugger steps from `step` into a worker, and nothing has to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlhf_lightning.controller.cluster import ResourcePool
from rlhf_lightning.controller.device import Device, Placement
from rlhf_lightning.controller.in_process import InProcessTransport
from rlhf_lightning.parallel import WorldSpec
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Role, Settings


class Local(Strategy):
    """One device, this process, no Ray: for debugging, tests and small models.

    Args:
        settings: how the models compute.
        num_threads: of computation; 0 leaves the process's own number.
    """

    strategy_name = "local"

    def __init__(self, *, settings: Settings | None = None, num_threads: int = 0) -> None:
        super().__init__(devices=1, settings=settings)
        self.num_threads = num_threads

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """The one device for all roles."""
        return [ResourcePool("local", 1, tuple(roles))]

    def join(self) -> None:
        """There is no cluster to join."""

    def check(self, num_devices: int) -> None:
        """There is no cluster to ask."""

    def start(self, roles: Mapping[str, Role]) -> dict[str, Placement]:
        """Build the roles here."""
        device = Device(0)
        self.transport = InProcessTransport(device)
        placements, groups = self.placements(roles, self.place(tuple(roles), 1))
        spec = WorldSpec(size=1, address="", groups=tuple(dict.fromkeys(groups)), timeout_s=self.timeout_s)
        device.join(spec, self.num_threads or torch.get_num_threads())
        for name, placement in placements.items():
            device.host(name, placement)
        return placements
