"""The reference: the frozen model that the actor is kept close to."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorDict

from rlhf_lightning.controller import DP, register
from rlhf_lightning.workers.actor import SEQUENCES
from rlhf_lightning.workers.role import Role


@dataclass(frozen=True, kw_only=True)
class Reference(Role):
    """The actor before it was trained, unless a path says otherwise."""

    path: str = ""
    """As the actor's where empty."""
    temperature: float = 1.0
    """Divides the logits; the algorithm sets it to the actor's."""

    @register(transfer=DP, reads=SEQUENCES, returns=("ref_log_probs",))
    def compute_ref_log_prob(self, rows: TensorDict) -> TensorDict:
        """Log-probabilities [B, R] float32 of the responses."""
        found = self.engine.infer(rows, temperature=self.temperature)
        return TensorDict({"ref_log_probs": found["log_probs"]}, batch_size=found.batch_size)
