"""What a simulator answers: seconds, and what they are spent on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one piece of work of one model, and what they are spent on."""

    seconds: float
    """How long it takes; infinite where it cannot run."""
    bound: str
    """What most of it is spent on, such as `compute`, `inter-node network` or `pipeline bubble`."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds by what they are spent on; they sum to `seconds`."""

    @classmethod
    def of(cls, parts: Mapping[str, float]) -> Estimate:
        """An estimate whose seconds are the sum of the parts, and whose bound is the largest part."""
        return cls(sum(parts.values()), max(parts, key=lambda name: parts[name]), dict(parts))


def add(parts: dict[str, float], name: str, seconds: float) -> None:
    """Add seconds to one of the parts, in place."""
    parts[name] = parts.get(name, 0.0) + seconds
