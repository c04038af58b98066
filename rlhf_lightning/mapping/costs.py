"""What the search asks about a model; `simulated` answers by the simulators, tests by made-up numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_lightning.mapping.simulate import GenerationSizes
from rlhf_lightning.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class Layout:
    """How one model is divided over the devices of its set."""

    train: ParallelLayout
    """Layout while it trains and scores."""
    generation: GenerationSizes | None = None
    """Sizes while it generates; None for a model that never does."""


class Costs(Protocol):
    """Bytes and seconds of every model, on every layout, in every stage."""

    def layouts(self, role: str, devices: int) -> Sequence[Layout]:
        """The model's layouts on exactly `devices` devices: every training layout with every generation's."""

    def resident(self, role: str, layout: Layout) -> float:
        """Bytes per device that stay through the whole iteration."""

    def working(self, role: str, layout: Layout) -> float:
        """Bytes per device, beside all residents, that the model needs at the least while it computes."""

    def seconds(self, role: str, layout: Layout, free: float) -> Sequence[float]:
        """Seconds in each stage.

        Args:
            role: the model.
            layout: how it is divided.
            free: bytes per device that no model keeps through the iteration. More never takes longer;
                infinite seconds: it cannot run.
        """

    def signature(self, role: str) -> Hashable:
        """What models have in common that cost the same in every layout, whatever they are called."""

    @property
    def capacity(self) -> float:
        """Bytes of a device that models can use."""

    @property
    def elastic(self) -> frozenset[str]:
        """Roles whose seconds depend on `free`: they generate, and keys and values take it."""
