"""The placement that the automatic mapping finds for the machine at hand, or one that it found before."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_lightning.controller.cluster import ResourcePool
from rlhf_lightning.dataflow import read_dataflow, read_shapes, read_workload
from rlhf_lightning.mapping import hardware
from rlhf_lightning.mapping.machine import this_machine
from rlhf_lightning.mapping.partitions import pool_sizes
from rlhf_lightning.mapping.plan import Plan, plan
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Settings


@dataclass(frozen=True, kw_only=True)
class PoolOption:
    """Roles that share devices."""

    roles: tuple[str, ...]
    """Names of the algorithm's fields."""
    devices: int
    """How many they share."""


@dataclass(frozen=True, kw_only=True)
class MappingOption:
    """What is known beforehand."""

    hardware: str = ""
    """A known name, or a file that `rlhf calibrate` wrote; by default what this machine looks like."""
    pools: tuple[PoolOption, ...] = ()
    """The placement, as `rlhf map` prints it; empty: search for it."""


class Auto(Strategy):
    """Pools of the sizes that the search of `rlhf map` prefers for this algorithm, data and machine.

    The models' engine (FSDP) runs data parallel only, so the search leaves tensor shards and pipeline stages
    out (p = t = pg = tg = 1): it decides which models share devices, and how many. Roles without a model,
    and those that no step calls, stand with the first.

    Args:
        mapping: what is known beforehand.
        devices: as for every strategy; by default all GPUs, or one device for each core of the CPU.
        address: as for every strategy.
        settings: as for every strategy.
        offload: as for every strategy.
        timeout_s: as for every strategy.
    """

    strategy_name = "auto"

    def __init__(
        self,
        *,
        mapping: MappingOption | None = None,
        devices: int | None = None,
        address: str | None = None,
        settings: Settings | None = None,
        offload: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(
            devices=devices, address=address, settings=settings, offload=offload, timeout_s=timeout_s
        )
        self.mapping = mapping or MappingOption()

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """The given pools, or the best that the search finds; all roles together where only some are needed.

        Raises:
            ValueError: the given pools are not of these roles and devices, or the models do not fit.
        """
        if self.mapping.pools:
            return self._given(roles, devices)
        every = self.algorithm.roles()
        if set(roles) != set(every):
            return [ResourcePool("all", devices or 1, tuple(roles))]
        found = self.plan(devices or os.cpu_count() or 1).mappings[0]
        pools = [list(pool.roles) for pool in found.pools]
        placed = {role for pool in pools for role in pool}
        pools[0] += [role for role in roles if role not in placed]
        return [
            ResourcePool(members[0], pool.devices, tuple(role for role in roles if role in members))
            for members, pool in zip(pools, found.pools, strict=True)
        ]

    def plan(self, devices: int) -> Plan:
        """Search for the best mapping of the trainer's algorithm and data.

        Raises:
            ValueError: the models do not fit.
        """
        workload = read_workload(self.algorithm, self.settings, offload=self.offload)
        flow = read_dataflow(self.algorithm, workload.batch)
        machine = hardware.load(self.mapping.hardware) if self.mapping.hardware else this_machine(devices)
        costs = SimulatedCosts(
            machine, flow, read_shapes(self.algorithm), workload=workload, data_parallel_only=True
        )
        inside = range(1, min(devices, machine.gpus_per_node) + 1)
        sizes = sorted({*inside, *pool_sizes(devices, machine.gpus_per_node)})
        return plan(costs, devices, sizes=sizes)

    def _given(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        pools = self.mapping.pools
        named = [role for pool in pools for role in pool.roles]
        if missing := [role for role in roles if role not in named]:
            raise ValueError(
                f"Auto(mapping.pools of {', '.join(named)}): "
                f"lacks {', '.join(missing)}. Add each to one pool."
            )
        if twice := sorted({role for role in named if named.count(role) > 1}):
            raise ValueError(f"Auto(mapping.pools): {', '.join(twice)} stand in two pools. Keep one.")
        total = sum(pool.devices for pool in pools)
        if min(pool.devices for pool in pools) < 1 or (devices is not None and total > devices):
            raise ValueError(
                f"Auto(devices={devices}, mapping.pools with {[pool.devices for pool in pools]} devices): "
                f"each needs at least 1, and all {total}. Try devices={max(total, len(pools))}."
            )
        kept = [(pool, tuple(role for role in pool.roles if role in roles)) for pool in pools]
        return [ResourcePool(names[0], pool.devices, names) for pool, names in kept if names]
