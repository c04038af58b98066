"""Every model alone, and a second copy of the actor that generates (OpenRLHF's placement)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar, cast

from rlhf_lightning.controller import Caller, ResourcePool
from rlhf_lightning.controller.register import methods_of
from rlhf_lightning.strategies.standalone import SHARING, models_of, one_each
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.workers import Actor, Generator, Role, SeparateGeneration

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GENERATOR = "generator"
"""Name of the role that the strategy adds."""


class OpenRLHF(Strategy):
    """One pool a model, and one for the generator, which is sent the actor's weights after every update.

    Functions stand with the first.
    """

    strategy_name = "openrlhf"
    makes_room = False
    of_generation: ClassVar[tuple[str, ...]] = ("generator_devices",)
    """Options that are read only where an actor generates, and refused elsewhere."""

    generator_devices: int | None = None
    """Devices of the generator, out of `devices`; by default as many as each other model has."""

    def __post_init__(self) -> None:
        """See `Strategy`; nothing generates yet."""
        super().__post_init__()
        self.generation: SeparateGeneration | None = None
        """Receives the calls on the actor's handle, during a run with a generator."""

    def models(self) -> dict[str, Role]:
        """The algorithm's roles, and a generator if there is an actor whose answers it learns from.

        Raises:
            ValueError: a role has that name, or the actor's class a `generate_sequences` of its own.
        """
        roles = super().models()
        if GENERATOR in roles:
            raise ValueError(
                f"{type(self.algorithm).__name__}.{GENERATOR}: {type(self).__name__} adds a role called "
                f"{GENERATOR}, the copy of the actor that answers. Call yours something else, or try "
                "--strategy standalone."
            )
        actor = roles.get("actor")
        if not isinstance(actor, Actor) or self.algorithm.reads_only:
            return roles
        _refuse_own_generation(actor, strategy=type(self).__name__)
        return roles | {GENERATOR: Generator.of(actor)}

    def place(self, roles: Sequence[str], devices: int | None) -> list[ResourcePool]:
        """Give the generator its devices, and divide the others evenly.

        Raises:
            ValueError: the devices do not divide by the number of roles, none is left for them, or an option
                of generation is given where nothing generates.
        """
        if GENERATOR not in roles:
            self._refuse_unread(roles)
        wanted, name, models = self.generator_devices, type(self).__name__, self.apart(roles)
        others = [model for model in models if model != GENERATOR]
        if wanted is None:
            instead = _rest(len(others), devices or 0) if GENERATOR in roles else ""
            return one_each(roles, devices, models=models, name=name, instead=instead)
        total = wanted + len(others) if devices is None else devices
        each, over = divmod(total - wanted, len(others))
        if wanted < 1 or each < 1 or over:
            least = max(wanted, 1)
            kept = total - len(others) * max(1, (total - least) // len(others))
            instead = f"generator_devices={kept}, or " if kept > 0 else ""
            shared = SHARING if total < len(models) else ""
            raise ValueError(
                f"{name}(devices={total}, generator_devices={wanted}): {max(0, total - wanted)} are "
                f"left for {len(others)} models, which have equally many each. Try {instead}"
                f"devices={least + len(others) * max(1, each)} with generator_devices={least}{shared}."
            )
        placed = [role for role in roles if role != GENERATOR]
        pools = one_each(placed, total - wanted, models=others, name=name)
        return [*pools, ResourcePool(GENERATOR, wanted, (GENERATOR,))]

    def apart(self, roles: Sequence[str]) -> tuple[str, ...]:
        """Those of the roles that have devices of their own; the others stand with the first."""
        return models_of(self, roles)

    def _refuse_unread(self, roles: Sequence[str]) -> None:
        """Refuse options of generation where nothing generates."""
        usual = {field.name: field.default for field in fields(cast("DataclassInstance", self))}
        for name in self.of_generation:
            if (given := vars(self)[name]) != usual[name]:
                why = f"has no actor that would generate, only {', '.join(roles)}"
                if "actor" in roles:
                    why = "learns from given answers, and has no generator"
                raise ValueError(
                    f"{type(self).__name__}({name}={given}): nothing reads it, since the algorithm {why}. "
                    "Leave it out."
                )

    def links(self, devices: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """One link, from the actor's first device to all devices of the generator."""
        if GENERATOR not in devices:
            return {}
        link = (devices["actor"][0], *devices[GENERATOR])
        return {"actor": link, GENERATOR: link}

    def callers(self, workers: Mapping[str, Caller]) -> Mapping[str, Caller]:
        """The roles' own workers, but for the actor: its calls to generate go to the generator."""
        if GENERATOR not in workers:
            return workers
        recompute = self.algorithm.main_actor.recompute_log_probs
        self.generation = self.make_generation(
            workers["actor"], workers[GENERATOR], recompute_log_probs=recompute
        )
        return {**workers, "actor": self.generation}

    def after_step(self) -> None:
        """Send the generator the new weights, while critics still learn and the next batch is prepared."""
        if self.generation is not None:
            self.generation.synchronize()

    def teardown(self) -> None:
        """See `Strategy.teardown`; what generated goes with its devices."""
        self.generation = None
        super().teardown()

    def refuse_whole_answers(self, *, instead: str) -> None:
        """Refuse what needs all answers together, where they are handed on as they end.

        Args:
            instead: what to type instead.

        Raises:
            ValueError: an actor has an environment, or the actor draws answers with an `answer` of its own.
        """
        name, roles = type(self).__name__, self.algorithm.roles()
        if any(isinstance(role, Actor) and role.environment for role in roles.values()):
            raise ValueError(
                f"{name} hands answers on as they end, and actor.environment asks for several turns of all "
                f"together. Try {instead}."
            )
        actor = roles.get("actor")
        if not isinstance(actor, Actor) or self.algorithm.reads_only:
            return
        own = type(actor)
        if own.answer is not Actor.answer:
            raise ValueError(
                f"{name} hands answers on as they end, and {own.__name__}.answer, which gives all of them "
                f"together, is never called for them. Try {instead}."
            )

    def make_generation(
        self, actor: Caller, generator: Caller, *, recompute_log_probs: bool
    ) -> SeparateGeneration:
        """Make what receives the calls on the actor's handle."""
        return SeparateGeneration(actor, generator, recompute_log_probs=recompute_log_probs)


def _rest(others: int, devices: int) -> str:
    """What to type for a generator on all devices that equal others leave; empty where there are too few."""
    each = devices // (others + 1)
    return f", or generator_devices={devices - each * others}" if each else ""


def _refuse_own_generation(actor: Actor, *, strategy: str) -> None:
    """Refuse a `generate_sequences` of the user's own, which the generator does not call."""
    own, name = type(actor), "generate_sequences"
    if methods_of(own)[name] is not methods_of(Actor)[name]:
        raise ValueError(
            f"{own.__name__}.{name} is never called under {strategy}, where a copy of the actor generates. "
            "Override `answer` instead, which the copy calls too, or try --strategy colocated."
        )
