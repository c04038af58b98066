"""The follower: a model that learns nothing itself, but may become an average of the actor, or its copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from tensordict import TensorDict

from rlhf_lightning.controller import BROADCAST, Remote, register
from rlhf_lightning.field_types import check_types
from rlhf_lightning.workers.role import Role


@dataclass(frozen=True, kw_only=True)
class Follower(Remote):
    """The options of a role that follows the actor, beside those of its model.

    Raises:
        ValueError: `decay` is no share, or `every` no number of iterations after which it follows.
    """

    path: str = ""
    """As the actor's where empty."""
    decay: float | None = None
    """Follow the actor as an exponential average, keeping this share of its own weights; None: stay.
    A model that follows is loaded, and sent weights, even if nothing reads it."""
    every: int = 1
    """Iterations after which it does so; with decay=0 the actor replaces it then (SPIN, iterative DPO)."""

    def __post_init__(self) -> None:
        check_types(self)
        name = type(self).__name__  # the field that holds it may be called anything
        if self.decay is not None and not 0 <= self.decay <= 1:
            raise ValueError(f"{name}(decay={self.decay}): is a share. Try 0.99, or leave it out.")
        if self.every < 1 or (self.every > 1 and self.decay is None):
            raise ValueError(
                f"{name}(every={self.every}, decay={self.decay}): it follows the actor "
                "after so many iterations, at least 1, as decay says. Try decay=0.0, which replaces it."
            )

    @property
    def weights_change(self) -> bool:
        """Whether it follows the actor, and so no longer equals its directory."""
        return self.decay is not None

    def follows_after(self, iteration: int) -> bool:
        """Whether it follows the actor once this iteration, counted from 1, is done."""
        return self.weights_change and iteration % self.every == 0

    @register(transfer=BROADCAST, reads=("weights",), returns=("followed",))
    def follow(self, rows: TensorDict) -> TensorDict:
        """Average in the actor's `weights` [1, N] float32: keep the share `decay` of the own ones."""
        decay = 1.0 if self.decay is None else self.decay
        cast(Role, self).engine.follow_weights(rows["weights"][0], decay=decay)
        return TensorDict({"followed": torch.ones(1)}, batch_size=1)
