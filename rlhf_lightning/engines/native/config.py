"""Options of the native generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Native:
    """How the native generator uses memory; but for `cache_dtype`, none of it changes what is generated."""

    slots: int = 0
    """Most rows decoded at once; 0: all rows of a call, on a GPU as many as there is memory for."""
    refill: int = 8
    """Waiting prompts are computed when this many slots are free (or as many as still wait)."""
    prefill_tokens: int = 16384
    """Most prompt tokens in one forward, all copies of a prompt counted; a longer prompt goes alone."""
    cache_dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Type of the stored keys and values; `model` keeps them as they are computed. `bfloat16` rounds those of
    a float32 model, and answers and their log_probs differ a little from what it trains with."""

    def __post_init__(self) -> None:
        if self.slots < 0:
            raise ValueError(
                f"strategy.settings.generate.slots={self.slots}: use 0 to decode all rows at once."
            )
        if self.refill < 1 or self.prefill_tokens < 1:
            raise ValueError(
                f"strategy.settings.generate.refill={self.refill} with prefill_tokens={self.prefill_tokens}: "
                "use at least 1."
            )

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of the stored keys and values; None: as the model computes them."""
        return None if self.cache_dtype == "model" else getattr(torch, self.cache_dtype)
