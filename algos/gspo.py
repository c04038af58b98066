"""GSPO: one probability ratio for a whole answer, clipped (Zheng 2025)."""

from __future__ import annotations

from dataclasses import field

from rlhf_lightning.algos.grpo import GRPO
from rlhf_lightning.functional import PolicyLoss, SequencePolicyLoss
from rlhf_lightning.workers import Actor


class GSPO(GRPO):
    """Zheng 2025 eq. 5: GRPO with another loss."""

    actor: Actor = field(default_factory=lambda: Actor(recompute_log_probs=True))
    """Its log-probabilities are the training engine's: limits are narrower than what engines round apart."""
    policy_loss: PolicyLoss = field(default_factory=SequencePolicyLoss)
    """The actor's loss."""

    def setup(self, stage: str) -> None:
        """As for every algorithm; also refuse log-probabilities rounded by more than the ratio may move.

        Raises:
            ValueError: the actor computes in bfloat16 and does not recompute them.
        """
        if self.actor.dtype == "bfloat16" and not self.actor.recompute_log_probs:
            raise ValueError(
                "GSPO with actor.dtype=bfloat16: the generator's log-probabilities are rounded by more than "
                "the ratio may move, so a third of the tokens would be clipped before anything is learned. "
                "Try --algo.actor.recompute_log_probs true."
            )
        super().setup(stage)
