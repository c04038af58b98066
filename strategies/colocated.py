"""All models share all devices (DeepSpeed-Chat's placement)."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_lightning.controller import ResourcePool
from rlhf_lightning.strategy import Strategy


class Colocated(Strategy):
    """One pool: models take turns on every device."""

    strategy_name = "colocated"

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """All devices, or one, for all roles."""
        return [ResourcePool("all", devices or 1, tuple(roles))]
