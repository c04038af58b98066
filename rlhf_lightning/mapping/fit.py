"""Fits the shares and overheads of a hardware to measured seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_lightning.mapping.hardware import Hardware

Key = tuple[str, str]
"""`efficiency` or `overhead`, and the name of a field of it."""

_LEAST = 1e-6
"""Where an overhead of 0 begins, which no factor could change."""


@dataclass(frozen=True)
class Observation:
    """Something that was measured and can be predicted."""

    name: str
    """For reports."""
    seconds: float
    """As measured."""
    predict: Callable[[Hardware], float]
    """Seconds that a hardware gives."""

    def error(self, hardware: Hardware) -> float:
        """Logarithm of predicted over measured."""
        return math.log(self.predict(hardware) / self.seconds)


def mean_square(observations: Sequence[Observation]) -> Callable[[Hardware], float]:
    """What `fit` makes small: the mean squared logarithm of predicted over measured."""
    return lambda hardware: sum(o.error(hardware) ** 2 for o in observations) / len(observations)


def fit(
    hardware: Hardware,
    loss: Callable[[Hardware], float],
    free: Sequence[Key],
    *,
    ceilings: Mapping[str, float] | None = None,
    tie: float = 0.01,
) -> Hardware:
    """The hardware with the free numbers at which the loss is least.

    Coordinate descent with shrinking steps in the logarithm of each number. `tie` keeps those near their
    start that the loss hardly depends on: it weighs their squared logarithms against the loss. A share does
    not exceed its ceiling, which is 1 where none is given.
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
    """One of the numbers."""
    value: float = getattr(getattr(hardware, key[0]), key[1])
    return value


def replaced(hardware: Hardware, key: Key, value: float) -> Hardware:
    """The same hardware with another number."""
    part, name = key
    return dataclasses.replace(
        hardware, **{part: dataclasses.replace(getattr(hardware, part), **{name: value})}
    )
