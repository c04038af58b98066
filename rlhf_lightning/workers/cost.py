"""The cost: what a constrained algorithm keeps low."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensordict import TensorDict

from rlhf_lightning.controller import DP, register
from rlhf_lightning.rewards import Kind
from rlhf_lightning.workers.actor import SEQUENCES
from rlhf_lightning.workers.judge import Judge, nothing
from rlhf_lightning.workers.naming import naming_judge
from rlhf_lightning.workers.role import Role


@dataclass(frozen=True, kw_only=True)
class Cost(Judge, Role):
    """Scores what is unwanted in responses with functions, a cost model, or both; it has no default."""

    kind: ClassVar[Kind] = "cost"

    @register(transfer=DP, reads=(*SEQUENCES, "rows"), returns=("costs",))
    def compute_cost(self, rows: TensorDict) -> TensorDict:
        """Costs [B, R] float32: the outcome at the last valid token, 0 elsewhere.

        Raises:
            ValueError: a function failed, or returned a wrong number of scores or one that is not finite.
        """
        judged = self.judged(self.engine, rows) if self.path else None
        if not self.worker.gives_output:  # functions and services are asked once a replica
            return nothing(rows, "costs")
        with naming_judge(self.worker.role or self.kind, self.kind):
            costs = self.limited(self.outcomes(rows, judged)[0], rows)
        return TensorDict({"costs": costs}, batch_size=rows.batch_size)
