"""The critic: estimates the reward still to come at every token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tensordict import TensorDict

from rlhf_lightning.controller import DP, DP_METRIC, register
from rlhf_lightning.engines import Head
from rlhf_lightning.functional import Loss
from rlhf_lightning.spec import OptimizerSpec
from rlhf_lightning.workers.actor import SEQUENCES
from rlhf_lightning.workers.role import Role


@dataclass(frozen=True, kw_only=True)
class Critic(Role):
    """A value head on a language model's backbone."""

    path: str = ""
    """As the actor's where empty; a causal model gets a fresh value head."""
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(lr=1e-5))
    """A fresh head learns from nothing: the rate is ten times an actor's."""
    head: ClassVar[Head] = "scalar"
    trains: ClassVar[bool] = True

    @register(transfer=DP, reads=SEQUENCES, returns=("values",))
    def compute_values(self, rows: TensorDict) -> TensorDict:
        """Values [B, R] float32 of the state before each response token."""
        return self.engine.infer(rows, temperature=1.0, keep=True)

    @register(transfer=DP_METRIC, reads=SEQUENCES)
    def update_critic(self, rows: TensorDict, *, loss: Loss) -> Mapping[str, float]:
        """One optimizer step on a mini-batch; reads the `columns` of the loss too."""
        return self.update(rows, loss=loss, temperature=1.0)

    @register(transfer=DP_METRIC, reads=SEQUENCES)
    def compute_loss(self, rows: TensorDict, *, loss: Loss) -> Mapping[str, float]:
        """The metrics of a loss, without learning from it."""
        return self.evaluate(rows, loss=loss, temperature=1.0)
