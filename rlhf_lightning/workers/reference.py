"""The reference: the frozen model that the actor is kept close to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from tensordict import TensorDict

from rlhf_lightning.controller import DP, Worker, register
from rlhf_lightning.engines import Asked, shared_base_model
from rlhf_lightning.workers.actor import SEQUENCES, Actor
from rlhf_lightning.workers.follower import Follower
from rlhf_lightning.workers.role import Role


@dataclass(frozen=True, kw_only=True)
class Reference(Follower, Role):
    """The actor before it was trained, unless a path says otherwise.

    Raises:
        ValueError: the temperature is negative, or an option of a follower is wrong.
    """

    temperature: float | None = None
    """Divides the logits; that of the actor's sampling where None."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(
                f"{type(self).__name__}(temperature={self.temperature}): it would find the least likely "
                "tokens the likeliest. Try 1.0, or leave it out."
            )

    def build(self, worker: Worker) -> None:
        """Load the model, unless this device has it already as the base model of the actor's adapters."""
        base = None if self.weights_change else shared_base_model(self, seat=worker)
        if base is None:
            super().build(worker)
        else:
            self.binding.worker, self.binding.engine = worker, base

    def following(self, actor: Role) -> Self:
        """A copy with the actor's path and sampling temperature where it has none of its own."""
        same = super().following(actor)
        if self.temperature is not None or not isinstance(actor, Actor):
            return same
        return replace(same, temperature=actor.sampling.temperature)

    @register(transfer=DP, reads=SEQUENCES, returns=("ref_log_probs",))
    def compute_ref_log_prob(self, rows: TensorDict) -> TensorDict:
        """Log-probabilities [B, R] float32 of the responses."""
        found = self.engine.infer(rows, temperature=self.temperature or 1.0)
        return TensorDict({"ref_log_probs": found["log_probs"]}, batch_size=found.batch_size)

    @register(transfer=DP, reads=SEQUENCES, returns=("candidate_ids", "candidate_ref_log_probs"))
    def compute_ref_candidates(self, rows: TensorDict, *, size: int = 64, among: int = 0) -> TensorDict:
        """The likeliest words in each response token's place, for a loss that has them as `candidates`.

        Args:
            rows: prompts and responses.
            size: how many words k, the likeliest first.
            among: only the first so many words, where the model that learns has fewer; 0: all.

        Returns:
            candidate_ids [B, R, k] int32, and their log-probabilities candidate_ref_log_probs [B, R, k]
            float32 in the distribution over all words.

        Raises:
            ValueError: no words are asked for, or more than there are.
        """
        if size < 1:
            raise ValueError(f"compute_ref_candidates(size={size}): is a number of words. Try 64.")
        asked = Asked(likeliest=size, among=among)
        found = self.engine.infer(rows, temperature=self.temperature or 1.0, asked=asked)
        columns = {
            "candidate_ids": found["candidate_ids"],
            "candidate_ref_log_probs": found["candidate_log_probs"],
        }
        return TensorDict(columns, batch_size=found.batch_size)
