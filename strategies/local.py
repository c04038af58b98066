"""All models in this very process: a debugger steps from `step` into a worker, and nothing has to start."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from types import FrameType

import torch

from rlhf_lightning.controller import ResourcePool
from rlhf_lightning.controller.device import Device, Placement
from rlhf_lightning.controller.in_process import InProcessTransport
from rlhf_lightning.cores import usable_cores
from rlhf_lightning.parallel import WorldSpec
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Role
from rlhf_lightning.workers.placement_summary import log_placements


class Local(Strategy):
    """One device, this process, no Ray: for debugging, tests and small models."""

    strategy_name = "local"
    in_process = True

    num_threads: int = 0
    """Threads of computation; 0 leaves the number of the process, or takes its container's quota of cores."""

    # One device, this process: there is nothing to choose.
    devices: int | None = field(default=1, init=False)
    address: str | None = field(default=None, init=False)
    offload: bool = field(default=False, init=False)
    timeout_s: float = field(default=1800.0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_threads < 0:
            raise ValueError(
                f"strategy.num_threads={self.num_threads}: is negative. Use 0 for the number of the process."
            )

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """The one device for all roles."""
        return [ResourcePool("local", 1, tuple(roles))]

    def join(self) -> None:
        """There is no cluster to join."""

    def start(self, roles: Mapping[str, Role]) -> dict[str, Placement]:
        """Build the roles here."""
        device = Device(0)
        self.transport = InProcessTransport(device)
        placements, groups = self.placements(roles, self.place(tuple(roles), 1))
        log_placements(placements)
        spec = WorldSpec(size=1, address="", groups=tuple(dict.fromkeys(groups)), timeout_s=self.timeout_s)
        device.join(spec, self.num_threads or min(torch.get_num_threads(), usable_cores()))
        for name, placement in placements.items():
            device.host(name, placement)
        return placements

    def on_validation_start(self) -> None:
        """Let SIGTERM end the run at once, as it does where devices are Ray's.

        Lightning's handler, which each run has anew, waits for the end of the iteration, and in a prediction
        is never looked at.
        """
        theirs = signal.getsignal(signal.SIGTERM)
        ours = isinstance(theirs, partial) and theirs.func is _end
        if callable(theirs) and not ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, partial(_end, theirs))

    on_test_start = on_predict_start = on_validation_start

    def on_train_start(self) -> None:
        """See `Strategy.on_train_start`, and let SIGTERM end the run."""
        super().on_train_start()
        self.on_validation_start()


def _end(theirs: Callable[[int, FrameType | None], object], number: int, frame: FrameType | None) -> None:
    """Do what another handler of the signal does, and end the run."""
    theirs(number, frame)
    sys.exit(128 + number)
