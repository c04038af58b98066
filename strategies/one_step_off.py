"""Every model alone, a generator that is one batch ahead: it answers while the others learn."""

from __future__ import annotations

from rlhf_lightning.controller import Caller
from rlhf_lightning.strategies.openrlhf import OpenRLHF
from rlhf_lightning.workers import GenerationAhead


class OneStepOff(OpenRLHF):
    """As OpenRLHF, but answers are drawn with the weights of one iteration before.

    The policy loss compares with the log-probabilities of those weights; with `actor.recompute_log_probs` and
    `policy_loss.correction` it compares with the present ones, and weighs each token for what the two differ.
    An iteration that continues from a checkpoint begins as the first did.
    """

    strategy_name = "one-step-off"

    def separate(self, actor: Caller, generator: Caller) -> GenerationAhead:
        """What the actor's handle calls."""
        again = self.algorithm.main_actor.recompute_log_probs
        self._ahead = GenerationAhead(actor, generator, recompute_log_probs=again)
        return self._ahead

    def numbers(self) -> dict[str, float]:
        """`response/staleness`: 0 in the first iteration, 1 in all others."""
        return {"response/staleness": float(self._ahead.staleness)}
