"""The scorer: a reward, cost or process reward model while it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tensordict import TensorDict

from rlhf_lightning.controller import DP, DP_METRIC, register
from rlhf_lightning.engines import Head
from rlhf_lightning.functional import Loss, at_last_valid, last_valid
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

    @register(transfer=DP, reads=SEQUENCES, returns=("scores",))
    def compute_scores(self, rows: TensorDict) -> TensorDict:
        """Scores [B, R] float32 by the present weights: the outcome at the last valid token, 0 elsewhere."""
        values, mask = self.engine.infer(rows, temperature=1.0)["values"].cpu(), rows["response_mask"]
        return TensorDict({"scores": at_last_valid(last_valid(values, mask), mask)}, batch_size=len(rows))

    @register(transfer=DP_METRIC, reads=SEQUENCES)
    def update_scorer(self, rows: TensorDict, *, loss: Loss) -> Mapping[str, float]:
        """One optimizer step on a mini-batch; reads the `columns` of the loss too."""
        return self.update(rows, loss=loss, temperature=1.0)

    @register(transfer=DP_METRIC, reads=SEQUENCES)
    def compute_loss(self, rows: TensorDict, *, loss: Loss) -> Mapping[str, float]:
        """The metrics of a loss, without learning from it."""
        return self.evaluate(rows, loss=loss, temperature=1.0)
