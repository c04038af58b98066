"""What the attention functions need to know about a layer."""

from __future__ import annotations

from typing import NamedTuple


class Layer(NamedTuple):
    """One of a model's attention layers."""

    number: int
    """Its index in the model, from 0."""
    scaling: float
    """Factor of the products of queries and keys."""
    window: int
    """A token attends to at most so many tokens, itself included; 0: to all before it."""
