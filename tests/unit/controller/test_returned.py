"""What methods are given and return is the same whatever the placement: nobody else's memory or objects."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from rlhf_lightning.controller import DP, Batch, WorkerGroup, register
from rlhf_lightning.parallel import ParallelLayout
from tests.ray.echo import Echo
from tests.unit.controller.devices import Devices, host


class Keeping(Echo):
    """A role that keeps what it has returned."""

    def __init__(self, group: WorkerGroup | None = None) -> None:
        super().__init__(group)
        self.sums = torch.zeros(2)
        self.log: list[list[int]] = [[], []]

    @register(transfer=DP, reads=("n",), returns=("total", "log"))
    def count(self, rows: TensorDict) -> TensorDict:
        """Sums so far, and what they were made of."""
        self.sums += rows["n"]
        for kept, number in zip(self.log, rows["n"].tolist(), strict=True):
            kept.append(number)
        return {"total": self.sums, "log": self.log}  # type: ignore[return-value]


def keeping(ranks: int) -> Keeping:
    """The role on devices of its own."""
    layout, devices = ParallelLayout(d=ranks), Devices(ranks)
    for part in devices.parts:
        host(part.device, Keeping(), layout)
    return Keeping(WorkerGroup("echo", devices, layout, tuple(range(ranks))))


def test_what_a_method_returned_stays_as_it_was() -> None:
    role, batch = keeping(1), Batch.of({"n": torch.tensor([1, 2])})
    first, second = role.count(batch), role.count(batch)
    assert first["total"].tolist() == [1, 2]
    assert second["total"].tolist() == [2, 4]
    assert first.objects("log") == [[1], [2]]
    assert second.objects("log") == [[1, 1], [2, 2]]
