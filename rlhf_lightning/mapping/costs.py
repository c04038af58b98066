"""What the search asks about a model; `simulated` answers by the simulators, tests by made-up numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from rlhf_lightning.parallel.layout import ParallelLayout


class Costs(Protocol):
    """Bytes and seconds of every model, on every layout, in every stage."""

    def layouts(self, role: str, devices: int) -> Sequence[ParallelLayout]:
        """The model's layouts on exactly `devices` devices: every training layout with every generation's.

        A model that never generates has layouts without a generation's.
        """

    def resident(self, role: str, layout: ParallelLayout) -> float:
        """Bytes per device that stay through the whole iteration."""

    def working(self, role: str, layout: ParallelLayout) -> float:
        """Bytes per device, beside all residents, that the model needs at the least while it computes."""

    def seconds(self, role: str, layout: ParallelLayout, free: float) -> Sequence[float]:
        """Seconds in each stage.

        Args:
            role: the model.
            layout: how it is divided.
            free: bytes per device that no model keeps through the iteration; infinite seconds: it cannot
                run. The search is exact where more never takes longer.
        """

    def signature(self, role: str) -> Hashable:
        """What models have in common that cost the same in every layout, whatever they are called."""

    @property
    def capacity(self) -> float:
        """Bytes of a device that models can use."""

    @property
    def elastic(self) -> frozenset[str]:
        """Roles whose seconds depend on `free`: they generate, and keys and values take it."""
