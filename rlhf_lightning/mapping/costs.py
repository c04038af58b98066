"""What the search asks of its simulators; anything that answers can be searched."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_lightning.mapping.simulate import GenerationSizes
from rlhf_lightning.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class Layout:
    """How one model stands on the devices of its set."""

    train: ParallelLayout
    """While it trains and scores."""
    generation: GenerationSizes | None = None
    """While it generates; None for a model that never does."""


class Costs(Protocol):
    """Bytes and seconds of every model, on every layout, in every stage."""

    def layouts(self, role: str, devices: int) -> Sequence[Layout]:
        """Layouts that fill so many devices: each training layout with each of its generation's."""

    def resident(self, role: str, layout: Layout) -> float:
        """Bytes per device that stay through the whole iteration."""

    def working(self, role: str, layout: Layout) -> float:
        """Bytes per device, beside all residents, that the model needs at the least while it computes."""

    def seconds(self, role: str, layout: Layout, free: float) -> Sequence[float]:
        """Seconds in each stage.

        Args:
            role: the model.
            layout: how it stands.
            free: bytes per device that no resident takes. More never takes longer; infinite time means that
                it cannot run.
        """

    def signature(self, role: str) -> Hashable:
        """Equal for models that cost the same in everything."""

    @property
    def capacity(self) -> float:
        """Bytes of a device."""

    @property
    def elastic(self) -> frozenset[str]:
        """Roles whose seconds depend on `free`: it holds the keys and values of a generation."""
