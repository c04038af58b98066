"""The fit: the shares and overheads of a hardware with which the simulators predict measured seconds best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_lightning.mapping.hardware import Hardware

Key = tuple[str, str]
"""`efficiency` or `overhead`, and the name of a field of it."""

_LEAST = 1e-6
"""Seconds from which an overhead of 0 starts: steps are factors, which would leave 0 at 0."""


@dataclass(frozen=True)
class Observation:
    """Measured seconds of some work, and how they are predicted."""

    name: str
    """What reports call it."""
    seconds: float
    """Measured seconds."""
    predict: Callable[[Hardware], float]
    """Predicted seconds on a hardware."""

    def error(self, hardware: Hardware) -> float:
        """Logarithm of predicted over measured."""
        return math.log(self.predict(hardware) / self.seconds)


def mean_square(observations: Sequence[Observation]) -> Callable[[Hardware], float]:
    """The usual loss of `fit`: the mean squared logarithm of predicted over measured seconds."""
    return lambda hardware: sum(o.error(hardware) ** 2 for o in observations) / len(observations)


def fit(
    hardware: Hardware,
    loss: Callable[[Hardware], float],
    free: Sequence[Key],
    *,
    ceilings: Mapping[str, float] | None = None,
    tie: float,
) -> Hardware:
    """The hardware whose `free` numbers make the loss least, by coordinate descent in their logarithms.

    Args:
        hardware: where the search starts.
        loss: what is minimised.
        free: the numbers that change; overheads of 0 start at 1e-6 s.
        ceilings: largest value of a share, by name; 1 for the others.
        tie: weight of sum(log(number / start)^2), which is added to the loss: it keeps numbers near their
            start that the loss hardly depends on.
    """
    for key in free:
        hardware = replaced(hardware, key, max(get(hardware, key), _LEAST))
    start = {key: get(hardware, key) for key in free}

    def total(trial: Hardware) -> float:
        return loss(trial) + tie * sum(math.log(get(trial, key) / start[key]) ** 2 for key in free)

    best, step = total(hardware), 0.5
    while step > 0.002:
        before = best
        for key in free:
            for factor in (math.exp(step), math.exp(-step)):
                value = get(hardware, key) * factor
                if key[0] == "efficiency" and value > (ceilings or {}).get(key[1], 1.0):
                    continue
                trial = replaced(hardware, key, value)
                if (found := total(trial)) < best:
                    hardware, best = trial, found
        step *= 1 if best < 0.999 * before else 0.5
    return hardware


def get(hardware: Hardware, key: Key) -> float:
    """A number of a hardware by its key."""
    value: float = getattr(getattr(hardware, key[0]), key[1])
    return value


def replaced(hardware: Hardware, key: Key, value: float) -> Hardware:
    """The same hardware with another number."""
    part, name = key
    return dataclasses.replace(
        hardware, **{part: dataclasses.replace(getattr(hardware, part), **{name: value})}
    )
