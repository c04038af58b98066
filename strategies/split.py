"""The actor's side and the critic's side on devices of their own (NeMo-Aligner's placement)."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_lightning.controller import ResourcePool
from rlhf_lightning.strategies.standalone import SHARING, models_of
from rlhf_lightning.strategy import Strategy

ACTOR_SIDE = ("actor", "reference")


class Split(Strategy):
    """Two pools: {actor, reference} and {everything else}, which work side by side.

    One, where everything else are functions.
    """

    strategy_name = "split"

    actor_devices: int | None = None
    """Devices of the first pool; half of all by default."""

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """Halve the devices, or give the actor's side as many as asked for.

        Raises:
            ValueError: a side would have no device, the halves would differ and none was asked for, or one
                was asked for where there are no sides.
        """
        name, models = type(self).__name__, models_of(self, roles)
        pools = two_sides(roles, devices, models=models, actor_devices=self.actor_devices, name=name)
        if self.actor_devices is not None and len(pools) == 1:
            raise ValueError(
                f"{name}(actor_devices={self.actor_devices}): nothing reads it, since the algorithm has "
                f"models of one side alone ({', '.join(models)}), on all devices. Leave it out."
            )
        return pools


def two_sides(
    roles: Sequence[str],
    devices: int | None,
    *,
    models: Sequence[str],
    actor_devices: int | None,
    name: str,
) -> list[ResourcePool]:
    """The pools of {actor, reference} and of {everything else}; one, where only one of them has models.

    Args:
        roles: names of all roles.
        devices: devices there are; None takes as few as it can.
        models: those of the roles that need devices, see `models_of`.
        actor_devices: devices of the first pool; half of all where None.
        name: of the strategy, for errors.

    Raises:
        ValueError: a side would have no device, or the halves would differ and none was asked for.
    """
    first = tuple(role for role in roles if role in ACTOR_SIDE)
    second = tuple(role for role in roles if role not in ACTOR_SIDE)
    if len({model in ACTOR_SIDE for model in models}) < 2:
        return [ResourcePool("all", devices or 1, tuple(roles))]
    total = devices if devices is not None else 2 * max(1, actor_devices or 1)
    actor = actor_devices if actor_devices is not None else total // 2
    if total == 1:
        raise ValueError(f"{name}(devices=1): 1 device has no two halves. Try devices=2{SHARING}.")
    if actor_devices is None and total % 2:
        raise ValueError(
            f"{name}(devices={total}): {total} devices are not two equal halves. Try devices={total - 1}, or "
            f"say how many the actor's side has: --strategy.actor_devices {total // 2 + 1}."
        )
    if not 0 < actor < total:
        raise ValueError(
            f"{name}(devices={total}, actor_devices={actor}): {actor} for {first} leaves "
            f"{total - actor} for {second}. Try actor_devices between 1 and {total - 1}."
        )
    return [ResourcePool("actor", actor, first), ResourcePool("critic", total - actor, second)]
