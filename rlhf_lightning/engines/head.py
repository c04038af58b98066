"""The head of an engine's model: what it computes for each response token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_lightning.functional.aggregate import Loss

Head = Literal["lm", "scalar", "reward"]
"""`lm`: log-probabilities; `scalar`: a number before each response token, as a critic's value; `reward`: a
number after each response token."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a language model computes for each response token beside its log-probability.

    Candidates are k words that could stand in the token's place.
    """

    entropy: bool = False
    """Whether the entropy of the distribution."""
    candidates: str = ""
    """A column of candidates [n, R, k], whose log-probabilities are wanted."""
    likeliest: int = 0
    """How many of the likeliest words, with their log-probabilities."""
    among: int = 0
    """Only the first so many words can be among the likeliest; 0: all."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of rows that it takes, beside those that every pass reads."""
        return (self.candidates,) if self.candidates else ()

    @classmethod
    def by(cls, loss: Loss) -> Asked:
        """What a loss reads of the model that it trains.

        Raises:
            ValueError: its candidates are no column that it reads.
        """
        if loss.candidates and loss.candidates not in loss.columns:
            raise ValueError(
                f"{type(loss).__name__}.candidates={loss.candidates!r}: is none of its columns. Name it "
                "there too."
            )
        return cls(entropy=loss.needs_entropy, candidates=loss.candidates)


PLAIN = Asked()
"""Nothing beside log-probabilities."""
