"""All models share all devices, each in its own (p, t, d); the actor generates in (pg, tg)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_lightning.controller.cluster import ResourcePool
from rlhf_lightning.options import unless_given
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.parallel.layout import Order
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Role


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How one role's model is divided.

    Raises:
        ValueError: a size is below 1.
    """

    p: int = 1
    """Pipeline stages."""
    t: int = 1
    """Tensor shards."""

    def __post_init__(self) -> None:
        if min(self.p, self.t) < 1:
            raise ValueError(f"{type(self).__name__}(p={self.p}, t={self.t}): every size is at least 1.")


@dataclass(frozen=True, kw_only=True)
class Parallel3D(Sizes):
    """How all models are divided, and in what the actor generates."""

    generate: Generation = field(default_factory=Generation)
    """The actor's shards in generation, and by which rule; by default one whole model a rank."""
    roles: dict[str, Sizes] = field(default_factory=dict)
    """Other sizes by role, such as {"critic": {"t": 1}}."""
    order: Order = "tpd"
    """Axes of the ranks from the fastest to the slowest: the paper's `tpd`, or Megatron's `tdp`."""


class HybridEngine3D(Strategy):
    """One pool; every role has its own p x t x d ranks there, and the actor moves to (pg, tg) to generate.

    HybridFlow section 5, the 3D-HybridEngine. d is what is left of the devices. Megatron-core trains.
    """

    strategy_name = "hybrid3d"
    engine = "megatron"

    parallel: Parallel3D = unless_given(factory=Parallel3D)
    """How the models are divided; by default not at all."""

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """All devices, or as few as the sizes need, for all roles.

        Raises:
            ValueError: `roles` names one that the algorithm does not have.
        """
        known = self.models()
        if unknown := sorted(set(self.parallel.roles) - set(known)):
            raise ValueError(
                f"{type(self).__name__}(parallel.roles={unknown}): the algorithm has no such role. "
                f"It has {', '.join(known)}."
            )
        needed = [self._sizes(known[name], name) for name in roles]
        return [ResourcePool("all", devices or math.lcm(*(s.p * s.t for s in needed)), tuple(roles))]

    def layout(self, role: Role, name: str, devices: int) -> ParallelLayout:
        """The sizes of the role, and replicas of them on all devices.

        Raises:
            ValueError: p t does not divide the devices.
        """
        sizes = self._sizes(role, name)
        each = sizes.p * sizes.t
        if devices % each:
            raise ValueError(
                f"{type(self).__name__}(devices={devices}): {name} has p={sizes.p} x t={sizes.t} = {each} "
                f"ranks a replica, which does not divide {devices}. Try --strategy.devices "
                f"{max(each, devices // each * each)}."
            )
        generate = self.parallel.generate if isinstance(role, Actor) else None
        return ParallelLayout(
            sizes.p, sizes.t, devices // each, order=self.parallel.order, generation=generate
        )

    def _sizes(self, role: Role, name: str) -> Sizes:
        """Sizes of a role; functions without a model need no more than a rank."""
        return self.parallel.roles.get(name, self.parallel) if role.path else Sizes()
