"""The reference: the frozen model that the actor is kept close to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from tensordict import TensorDict

from rlhf_lightning.controller import BROADCAST, DP, Worker, register
from rlhf_lightning.engines import Asked, shared_base_model
from rlhf_lightning.workers.actor import SEQUENCES, Actor
from rlhf_lightning.workers.role import Role


@dataclass(frozen=True, kw_only=True)
class Reference(Role):
    """The actor before it was trained, unless a path says otherwise.

    Raises:
        ValueError: `decay` is no share, or `every` no number of iterations after which it follows.
    """

    path: str = ""
    """As the actor's where empty."""
    temperature: float | None = None
    """Divides the logits; that of the actor's sampling where None."""
    decay: float | None = None
    """Become an exponential average of the actor: keep this share of the own weights; None: stay.
    With it the model is loaded, and sent weights, even where no term has a coefficient that reads it."""
    every: int = 1
    """Iterations after which it does so; with decay=0 the actor replaces it then (SPIN, iterative DPO)."""

    def __post_init__(self) -> None:
        if self.decay is not None and not 0 <= self.decay <= 1:
            raise ValueError(f"reference.decay={self.decay}: is a share. Try 0.99, or leave it out.")
        if self.every < 1 or (self.every > 1 and self.decay is None):
            raise ValueError(
                f"reference.every={self.every} with reference.decay={self.decay}: it follows the actor "
                "after so many iterations, at least 1, as decay says. Try decay=0.0, which replaces it."
            )

    @property
    def weights_change(self) -> bool:
        """Whether it follows the actor, and so no longer equals its directory."""
        return self.decay is not None

    def follows_after(self, iteration: int) -> bool:
        """Whether it follows the actor once this iteration, counted from 1, is done."""
        return self.weights_change and iteration % self.every == 0

    def build(self, worker: Worker) -> None:
        """Load the model, unless this device has it already as the base model of the actor's adapters."""
        base = None if self.weights_change else shared_base_model(self, seat=worker)
        if base is None:
            super().build(worker)
        else:
            self.binding.worker, self.binding.engine = worker, base

    @register(transfer=BROADCAST, reads=("weights",), returns=("followed",))
    def follow(self, rows: TensorDict) -> TensorDict:
        """Average in the actor's `weights` [1, N] float32: keep the share `decay` of the own ones."""
        self.engine.follow_weights(rows["weights"][0], decay=1.0 if self.decay is None else self.decay)
        return TensorDict({"followed": torch.ones(1)}, batch_size=1)

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
