"""The head of an engine's model: what it computes for each response token."""

from __future__ import annotations

from typing import Literal

Head = Literal["lm", "scalar", "reward"]
"""`lm`: log-probabilities; `scalar`: a number before each response token, as a critic's value; `reward`: a
number after each response token."""
