"""The opponent: an actor that draws and does not learn, such as an older self of the actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from rlhf_lightning.spec import Sampling
from rlhf_lightning.workers.actor import Actor
from rlhf_lightning.workers.follower import Follower
from rlhf_lightning.workers.role import Role

_LEARNING = frozenset({"update_actor", "accumulate_actor"})
"""Calls of an actor that an opponent refuses."""


@dataclass(frozen=True, kw_only=True)
class Opponent(Follower, Actor):
    """The actor as it was some iterations ago, which answers too (SPIN, Nash-MD)."""

    decay: float | None = 0.0
    """Share of the own weights that it keeps as it follows the actor; 0 becomes a copy, None stays."""
    sampling: Sampling | None = None  # type: ignore[assignment]  # `following` completes it
    """How responses are drawn; as the actor's where None."""
    temperature: float | None = None
    """At which it reads responses; that of `sampling` where None, or 1 beside given answers, as the actor."""
    needed_to_validate: ClassVar[bool] = False
    trains: ClassVar[bool] = False

    def arguments(self, method: str) -> Mapping[str, object]:
        """See `Actor.arguments`.

        Raises:
            ValueError: the call is one that learns.
        """
        if method in _LEARNING:
            raise ValueError(
                f"{type(self).__name__}.{method}: an opponent does not learn, it follows the field actor by "
                f"its decay. Call self.actor.{method}, or make the field an Actor."
            )
        return super().arguments(method)

    def following(self, actor: Role) -> Self:
        """A copy with the actor's path and sampling where it has none of its own."""
        same = super().following(actor)
        if self.sampling is not None or not isinstance(actor, Actor):
            return same
        return replace(same, sampling=actor.sampling)

    def reading(self) -> Self:
        """The same opponent for given answers: it reads as the actor does then, and draws as before."""
        return self if self.temperature is not None else replace(self, temperature=1.0)

    def reads_at(self, temperature: float | None) -> float:
        """See `Actor.reads_at`; `temperature` of its own where a call was told none.

        Raises:
            ValueError: it is negative.
        """
        return super().reads_at(self.temperature if temperature is None else temperature)
