"""Every model on devices of its own (OpenRLHF's placement)."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_lightning.controller.cluster import ResourcePool
from rlhf_lightning.strategy import Strategy


class Standalone(Strategy):
    """One pool a role, equal in size."""

    strategy_name = "standalone"

    def __post_init__(self) -> None:
        """Refuse offloading.

        Raises:
            ValueError: `offload` is set.
        """
        super().__post_init__()
        refuse_offload(self)

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """Divide the devices evenly, or give each role one.

        Raises:
            ValueError: the devices do not divide by the number of roles.
        """
        return one_each(roles, devices, name=type(self).__name__)


def one_each(roles: Sequence[str], devices: int | None, *, name: str) -> list[ResourcePool]:
    """A pool for each role, all of one size.

    Args:
        roles: names of the roles.
        devices: to divide; None gives each role one.
        name: of the strategy, for errors.

    Raises:
        ValueError: the devices do not divide by the number of roles.
    """
    total = devices if devices is not None else len(roles)
    if total % len(roles) or total < len(roles):
        nearest = max(1, total // len(roles)) * len(roles)
        raise ValueError(
            f"{name}(devices={total}): {total} devices cannot be divided over {len(roles)} roles "
            f"({', '.join(roles)}). Try devices={nearest}."
        )
    return [ResourcePool(role, total // len(roles), (role,)) for role in roles]


def refuse_offload(strategy: Strategy) -> None:
    """Refuse offloading where every model has devices of its own.

    Raises:
        ValueError: `offload` is set.
    """
    if strategy.offload:
        raise ValueError(
            f"{type(strategy).__name__}(offload=True): every model has devices of its own, and makes room "
            "for no other. Leave it out, or try --strategy colocated --strategy.offload true."
        )
