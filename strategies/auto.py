"""The placement and sizes that the automatic mapping finds for the machine at hand, or found before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from lightning.pytorch.utilities import rank_zero_info

from rlhf_lightning.controller import ResourcePool
from rlhf_lightning.controller.cluster import num_gpus
from rlhf_lightning.cores import usable_cores
from rlhf_lightning.mapping.dataflow import Dataflow
from rlhf_lightning.mapping.machine import of_a_run
from rlhf_lightning.mapping.partitions import pool_sizes
from rlhf_lightning.mapping.plan import Plan, plan
from rlhf_lightning.mapping.report import table
from rlhf_lightning.mapping.search import DeviceMapping
from rlhf_lightning.mapping.shapes import ModelShape
from rlhf_lightning.mapping.simulated import SimulatedCosts
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.mapping_inputs import read_dataflow, read_recipes, read_shapes, read_workload
from rlhf_lightning.options import unless_given
from rlhf_lightning.parallel import Generation, ParallelLayout
from rlhf_lightning.strategies.hybrid3d import Sizes
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.strategy_checks import check_placed
from rlhf_lightning.workers import Actor, Role, Settings


@dataclass(frozen=True, kw_only=True)
class RoleSizes(Sizes):
    """How one role's model is divided, and in what it generates."""

    generate: Generation = field(default_factory=Generation)
    """The actor's shards in generation."""


@dataclass(frozen=True, kw_only=True)
class PoolOption:
    """Roles that share devices."""

    roles: tuple[str, ...]
    """Names of the algorithm's fields."""
    devices: int
    """How many they share."""
    sizes: dict[str, RoleSizes] = field(default_factory=dict)
    """Of the roles that are divided, such as {"actor": {"p": 2, "t": 4, "generate": {"t": 2}}}."""


@dataclass(frozen=True, kw_only=True)
class MappingOption:
    """What the mapping need not find out: the hardware, or the placement itself."""

    hardware: str = ""
    """A known name, or a file as `rlhf calibrate` writes it; by default a description of this machine."""
    pools: tuple[PoolOption, ...] = ()
    """The placement, such as [{"roles": ["actor", "reward"], "devices": 2}]; empty: search for it."""


class Auto(Strategy):
    """Pools and layouts that the search of `rlhf map` prefers for this algorithm, data and machine.

    It decides which models share devices, and how many; with `settings.engine=megatron` also each model's
    (p, t, d) and the actor's (pg, tg). The other engines take replicas only here, so that the search leaves
    shards and stages out for them. Roles without a model stand with the first. Without `devices` it takes all
    GPUs, or a device for each core of the CPU.
    """

    strategy_name = "auto"

    mapping: MappingOption = unless_given(factory=MappingOption)
    """What is known beforehand."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sizes: dict[str, RoleSizes] = {}
        self._slots: dict[str, int] = {}
        self._found: dict[Hashable, Plan] = {}

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """The given pools, or the best that the search finds.

        Raises:
            ValueError: the given pools are not of these roles and devices, or the models do not fit.
        """
        if self.mapping.pools:
            return self._given(roles, devices)
        plans = self.plan(devices or usable_cores())
        found = plans.mappings[0]
        self._sizes = _sizes(found)
        tasks = [task for pool in found.pools for task in plans.tasks(pool)]
        self._slots = {task.role: task.rows_at_once for task in tasks if task.rows_at_once}
        pools = [list(pool.roles) for pool in found.pools]
        placed = {role for pool in pools for role in pool}
        pools[0] += [role for role in roles if role not in placed]
        return [
            ResourcePool(members[0], pool.devices, tuple(role for role in roles if role in members))
            for members, pool in zip(pools, found.pools, strict=True)
        ]

    def layout(self, role: Role, name: str, devices: int) -> ParallelLayout:
        """The sizes that were found or given, and replicas of them.

        Raises:
            ValueError: they do not divide the devices, or the engine takes replicas only.
        """
        sizes = self._sizes.get(name, RoleSizes())
        if sizes.ranks > 1 and not self.settings.training.takes_sizes:
            raise ValueError(
                f"Auto(mapping.pools): {name} has p={sizes.p}, t={sizes.t}, and strategy.settings.engine="
                f"{self.settings.engine} takes replicas only here. Add --strategy.settings.engine megatron, "
                "or leave the sizes out."
            )
        d = sizes.replicas(devices, whose=f"Auto(mapping.pools): {name}")
        generate = sizes.generate if isinstance(role, Actor) else None
        return ParallelLayout(sizes.p, sizes.t, d, generation=generate)

    def settings_of(self, name: str) -> Settings:
        """See `Strategy.settings_of`; models decode as many rows at once as the search found room for."""
        settings, slots = super().settings_of(name), self._slots.get(name)
        return replace(settings, generate=replace(settings.generate, slots=slots)) if slots else settings

    def plan(self, devices: int) -> Plan:
        """Search for the best mapping of the trainer's algorithm and data, and say which, once.

        Raises:
            ValueError: the models do not fit, or vLLM is to keep the memory that the search counts as free.
        """
        _check_sleep(self.settings)
        frees = self.offload and num_gpus() > 0  # on a CPU what is sent away stays where it is
        workload = read_workload(self.algorithm, self.settings, offload=frees)
        flow, shapes = read_dataflow(self.algorithm, workload.batch), read_shapes(self.algorithm)
        recipes = read_recipes(self.algorithm, self.settings, workload, flow)
        key = (devices, workload, flow, tuple(shapes.items()), tuple(recipes.items()))
        if key not in self._found:
            found = self._found[key] = self._search(devices, flow, shapes, workload=workload, recipes=recipes)
            rank_zero_info("\n".join(table(found, found.mappings[0], 1)))
        return self._found[key]

    def _search(
        self,
        devices: int,
        flow: Dataflow,
        shapes: dict[str, ModelShape],
        *,
        workload: Workload,
        recipes: dict[str, Workload],
    ) -> Plan:
        machine = of_a_run(self.mapping.hardware, devices, option="strategy.mapping.hardware")
        costs = SimulatedCosts(
            machine,
            flow,
            shapes,
            workload=workload,
            recipes=recipes,
            allows=self.settings.training.allows,
        )
        node = machine.gpus_per_node
        # Of several nodes only what fills nodes or divides one, so that no set lies in two; or all of them.
        among = range(1, devices) if devices <= node else pool_sizes(devices, node)
        return plan(costs, devices, sizes=sorted({*among, devices}))

    def _given(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        pools = self.mapping.pools
        check_placed([pool.roles for pool in pools], roles, where="Auto(mapping.pools)")
        if unsized := sorted({name for pool in pools for name in pool.sizes} - set(roles)):
            raise ValueError(f"Auto(mapping.pools.sizes of {', '.join(unsized)}): no pool has such a role.")
        total = sum(pool.devices for pool in pools)
        if empty := [", ".join(pool.roles) for pool in pools if pool.devices < 1]:
            raise ValueError(f"Auto(mapping.pools): {empty[0]} has no devices. Give each pool at least 1.")
        if devices is not None and total > devices:
            raise ValueError(
                f"Auto(devices={devices}, mapping.pools with {[pool.devices for pool in pools]} devices): "
                f"these are {total}. Try devices={total}."
            )
        self._sizes = {name: sizes for pool in pools for name, sizes in pool.sizes.items()}
        return [ResourcePool(pool.roles[0], pool.devices, pool.roles) for pool in pools if pool.roles]


def _check_sleep(settings: Settings) -> None:
    """Refuse vLLM that stays awake on a GPU: the search gives its share to the models that train."""
    if num_gpus() and settings.generator == "vllm" and not settings.vllm.sleep:
        raise ValueError(
            "strategy.settings.vllm.sleep=false with --strategy auto: vLLM would keep its share of each GPU "
            "while models train, which the search counts as free. Leave it out, give the placement "
            "(--strategy.mapping.pools), or take another strategy."
        )


def _sizes(found: DeviceMapping) -> dict[str, RoleSizes]:
    """How the search divides each role."""
    sizes = {}
    for pool in found.pools:
        for name, layout in pool.at.items():
            sizes[name] = RoleSizes(p=layout.p, t=layout.t, generate=layout.generation or Generation())
    return sizes
