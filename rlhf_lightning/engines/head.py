"""What an engine's model says of each response token."""

from __future__ import annotations

from typing import Literal

Head = Literal["lm", "scalar", "reward"]
"""Log-probabilities; a number before each response token (a critic's value), or after it (a reward)."""
