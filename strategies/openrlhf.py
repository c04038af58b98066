"""Every model alone, and a second copy of the actor that generates (OpenRLHF's placement)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_lightning.controller import Caller
from rlhf_lightning.controller.cluster import ResourcePool
from rlhf_lightning.strategies.standalone import one_each
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Generator, Role, SeparateGeneration

GENERATOR = "generator"
"""Name of the role that the strategy adds."""


class OpenRLHF(Strategy):
    """One pool a role, and one for the generator, which is sent the actor's weights after every update."""

    strategy_name = "openrlhf"

    generator_devices: int | None = None
    """Devices of the generator, of all that there are; by default as many as each role has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.separated: SeparateGeneration | None = None
        """What the actor's handle calls, during a run with a generator."""

    def models(self) -> dict[str, Role]:
        """The algorithm's roles, and a generator where there is an actor."""
        roles = super().models()
        actor = roles.get("actor")
        return roles | {GENERATOR: Generator.of(actor)} if isinstance(actor, Actor) else roles

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """Give the generator its devices, and divide the others evenly.

        Raises:
            ValueError: the devices do not divide by the number of roles, or none is left for them.
        """
        wanted = self.generator_devices
        if wanted is None or GENERATOR not in roles:
            return one_each(roles, devices, name=type(self).__name__)
        others = [role for role in roles if role != GENERATOR]
        total = wanted + len(others) if devices is None else devices
        each, over = divmod(total - wanted, len(others))
        if wanted < 1 or each < 1 or over:
            least = max(wanted, 1)
            kept = total - len(others) * max(1, (total - least) // len(others))
            instead = f"generator_devices={kept}, or " if kept > 0 else ""
            raise ValueError(
                f"{type(self).__name__}(devices={total}, generator_devices={wanted}): {total - wanted} are "
                f"left for {len(others)} roles, which have equally many each. Try {instead}"
                f"devices={least + len(others) * max(1, each)} with generator_devices={least}."
            )
        pools = one_each(others, total - wanted, name=type(self).__name__)
        return [*pools, ResourcePool(GENERATOR, wanted, (GENERATOR,))]

    def links(self, devices: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """From the actor's first device to all of the generator's."""
        if GENERATOR not in devices:
            return {}
        link = (devices["actor"][0], *devices[GENERATOR])
        return {"actor": link, GENERATOR: link}

    def callers(self, workers: Mapping[str, Caller]) -> Mapping[str, Caller]:
        """The actor's calls find the generator."""
        if GENERATOR not in workers:
            return workers
        again = self.algorithm.main_actor.recompute_log_probs
        self.separated = self.separate(workers["actor"], workers[GENERATOR], recompute_log_probs=again)
        return {**workers, "actor": self.separated}

    def after_step(self) -> None:
        """The generator is sent the new weights while critics still learn and the next batch is prepared."""
        if self.separated is not None:
            self.separated.synchronize()

    def separate(self, actor: Caller, generator: Caller, *, recompute_log_probs: bool) -> SeparateGeneration:
        """What the actor's handle calls."""
        return SeparateGeneration(actor, generator, recompute_log_probs=recompute_log_probs)


def refuse_offload(strategy: OpenRLHF) -> None:
    """Refuse to send models away from devices that they have for themselves.

    Raises:
        ValueError: as said.
    """
    if strategy.offload:
        raise ValueError(
            f"{type(strategy).__name__}(offload=True): every model has devices of its own, and makes room "
            "for no other. Leave it out, or try --strategy colocated --strategy.offload true."
        )


def refuse_environment(strategy: OpenRLHF, *, instead: str) -> None:
    """Refuse turns of an environment where answers do not come all together.

    Args:
        strategy: that hands them on in its own order.
        instead: what to type.

    Raises:
        ValueError: as said.
    """
    actors = [role for role in strategy.algorithm.roles().values() if isinstance(role, Actor)]
    if any(actor.environment for actor in actors):
        raise ValueError(
            f"{type(strategy).__name__} hands answers on as they end, and actor.environment asks for several "
            f"turns of all together. Try {instead}."
        )
