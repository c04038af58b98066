"""A transport within this process: one device, no Ray, and a debugger steps from `step` into the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_lightning.controller.block import Block
from rlhf_lightning.controller.call import Call, CallReport
from rlhf_lightning.controller.device import Device
from rlhf_lightning.controller.transport import Future, Submitted, Transport, futures_of


@dataclass(frozen=True)
class Made(Future):
    """A value that is already here."""

    value: object
    transport: Transport


class InProcessTransport(Transport):
    """Runs the calls of one device here and now."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self._reports: list[CallReport] = []

    def submit(self, device: int, call: Call, blocks: Sequence[Future | Block]) -> Submitted:
        """Run the call; `device` is always 0.

        Raises:
            WorkerError: a block is of a run with another strategy.
        """
        futures_of(Made, blocks)
        values = [block.value if isinstance(block, Made) else block for block in blocks]
        report, *columns = self.device.call(call, *(v for v in values if isinstance(v, Block)))
        assert isinstance(report, CallReport)
        self._reports.append(report)
        # Copies, as from another process: the method may keep what it has returned, and write into it.
        own = [column.copied() for column in columns if isinstance(column, Block)]
        made = {name: Made(column, self) for name, column in zip(call.returns, own, strict=True)}
        return Submitted(Made(report, self), made)

    def fetch(self, futures: Sequence[Future]) -> list[object]:
        """Return the values; counted like those that come from a device.

        Raises:
            WorkerError: one is of a run with another strategy.
        """
        return [self.counted(future.value) for future in futures_of(Made, futures)]

    def drain(self) -> list[CallReport]:
        """Return the reports since the last drain."""
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """Let the models go."""
        self.closed = True
        self.device.close()
