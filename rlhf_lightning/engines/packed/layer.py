"""What an attention layer says of itself."""

from __future__ import annotations

from typing import NamedTuple


class Layer(NamedTuple):
    """One of a model's attention layers."""

    number: int
    """Its place in the model, from 0."""
    scaling: float
    """Factor of query times key."""
    window: int
    """A token sees this many tokens, itself included; 0: all before it."""
