"""The scorer: a reward, cost or process reward model while it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tensordict import TensorDict

from rlhf_lightning.controller import DP_METRIC, register
from rlhf_lightning.engines import Head
from rlhf_lightning.functional import Loss
from rlhf_lightning.spec import OptimizerSpec
from rlhf_lightning.workers.actor import SEQUENCES
from rlhf_lightning.workers.role import Role


@dataclass(frozen=True, kw_only=True)
class Scorer(Role):
    """A number after every response token on a language model's backbone; exported, `Reward` reads it."""

    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(lr=1e-5))
    """A fresh head learns from nothing: the rate is ten times an actor's."""
    head: ClassVar[Head] = "reward"
    trains: ClassVar[bool] = True
    needed_to_validate: ClassVar[bool] = True

    @register(transfer=DP_METRIC, reads=SEQUENCES)
    def update_scorer(self, rows: TensorDict, *, loss: Loss) -> Mapping[str, float]:
        """One optimizer step on a mini-batch; reads the `columns` of the loss too."""
        return self.update(rows, loss=loss, temperature=1.0)

    @register(transfer=DP_METRIC, reads=SEQUENCES)
    def compute_loss(self, rows: TensorDict, *, loss: Loss) -> Mapping[str, float]:
        """The metrics of a loss, without learning from it."""
        return self.evaluate(rows, loss=loss, temperature=1.0)
