"""All models share all devices, each in its own (p, t, d); the actor generates in (pg, tg)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_lightning.controller import ResourcePool
from rlhf_lightning.options import unless_given
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.parallel.layout import Order
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.strategy_checks import left_out
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

    @property
    def ranks(self) -> int:
        """Ranks of a replica."""
        return self.p * self.t

    def replicas(self, devices: int, *, whose: str) -> int:
        """How many replicas stand on the devices of a pool.

        Args:
            devices: of the pool.
            whose: begins the error; option and role.

        Raises:
            ValueError: the ranks of a replica do not divide the devices.
        """
        if devices % self.ranks:
            raise ValueError(
                f"{whose} has p={self.p} x t={self.t} = {self.ranks} ranks a replica, which does not divide "
                f"{devices} devices. Try devices={max(self.ranks, devices // self.ranks * self.ranks)}."
            )
        return devices // self.ranks


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
            ValueError: `roles` names one that no step calls, or divides one without a model.
        """
        known = self.models()
        if unknown := sorted(set(self.parallel.roles) - set(known)):
            raise ValueError(
                f"{type(self).__name__}(parallel.roles={unknown}): the algorithm has no such role "
                f"that a step would call. It has {', '.join(known)}. {left_out(unknown)}"
            )
        divided = [name for name, sizes in self.parallel.roles.items() if sizes.ranks > 1]
        if whole := [name for name in divided if not known[name].path]:
            raise ValueError(
                f"{type(self).__name__}(parallel.roles={whole}): these have functions only, and no model to "
                "divide. Leave them out."
            )
        return [ResourcePool("all", devices or self._fewest_devices(roles), tuple(roles))]

    def layout(self, role: Role, name: str, devices: int) -> ParallelLayout:
        """The sizes of the role, and replicas of them on all devices.

        Raises:
            ValueError: p t does not divide the devices.
        """
        sizes = self._sizes(role, name)
        d = sizes.replicas(devices, whose=f"{type(self).__name__}(devices={devices}): {name}")
        generate = self.parallel.generate if isinstance(role, Actor) else None
        return ParallelLayout(sizes.p, sizes.t, d, order=self.parallel.order, generation=generate)

    def _sizes(self, role: Role, name: str) -> Sizes:
        """Sizes of a role; functions without a model need no more than a rank."""
        return self.parallel.roles.get(name, self.parallel) if role.path else Sizes()

    def _fewest_devices(self, roles: Sequence[str]) -> int:
        """The fewest devices that hold whole replicas of each of these roles."""
        known = self.models()
        return math.lcm(*(self._sizes(known[name], name).ranks for name in roles))
