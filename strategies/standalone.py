"""Every model on devices of its own (OpenRLHF's placement)."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_lightning.controller import ResourcePool
from rlhf_lightning.strategy import Strategy

SHARING = ", or --strategy colocated, where all models share every device"
"""What else to type where there are fewer devices than have to stand apart."""


class Standalone(Strategy):
    """One pool a model, equal in size; functions stand with the first."""

    strategy_name = "standalone"
    makes_room = False

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """Divide the devices evenly, or give each model one.

        Raises:
            ValueError: the devices do not divide by the number of models.
        """
        return one_each(roles, devices, models=models_of(self, roles), name=type(self).__name__)


def models_of(strategy: Strategy, roles: Sequence[str]) -> tuple[str, ...]:
    """The roles with a model; the others need no devices of their own.

    Args:
        strategy: that places them; as long as it has no algorithm, all roles pass for such models.
        roles: names of all roles.
    """
    if strategy.lightning_module is None:
        return tuple(roles)
    known = strategy.models()
    return tuple(role for role in roles if known[role].path) or tuple(roles)


def one_each(
    roles: Sequence[str], devices: int | None, *, models: Sequence[str], name: str, instead: str = ""
) -> list[ResourcePool]:
    """A pool for each model, all of one size; all other roles stand with the first.

    Args:
        roles: names of all roles.
        devices: to divide; None gives each model one.
        models: those of the roles that have pools, see `models_of`.
        name: of the strategy, for errors.
        instead: what else to type where the devices do not divide, begun by a comma.

    Raises:
        ValueError: the devices do not divide by the number of models.
    """
    total = devices if devices is not None else len(models)
    if total % len(models) or total < len(models):
        nearest = max(1, total // len(models)) * len(models)
        shared = SHARING if total < len(models) else ""
        raise ValueError(
            f"{name}(devices={total}): {total} device{'s' * (total > 1)} cannot be divided over "
            f"{len(models)} models ({', '.join(models)}). Try devices={nearest}{instead}{shared}."
        )
    first = tuple(role for role in roles if role == models[0] or role not in models)
    sets = [first, *((model,) for model in models[1:])]
    return [ResourcePool(model, total // len(models), s) for model, s in zip(models, sets, strict=True)]
