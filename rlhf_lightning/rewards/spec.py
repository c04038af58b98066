"""Which reward functions score a row, and with what weight."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Literal, Protocol

from rlhf_lightning.rewards.http import HTTPOptions
from rlhf_lightning.rewards.registry import Functions, Sources, function_weights

if TYPE_CHECKING:
    from rlhf_lightning.spec import ModelSpec

DEFAULT = "exact_match"
Kind = Literal["reward", "cost"]
"""What a score means: a reward is to be high, a cost to be low."""


class RewardFunction(Protocol):
    """A reward is a plain function: the texts and rows of a batch go in, a number for each comes out."""

    def __call__(
        self, prompts: list[str], responses: list[str], rows: list[dict[str, object]], /
    ) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Score the responses; an `async def` is awaited.

        Args:
            prompts: the texts that the model read.
            responses: the texts that it wrote, without special tokens.
            rows: the raw rows of the data, with `prompt` and `data_source`.

        Returns:
            One finite number for each response.
        """


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """What the reward of a response is: a weighted sum of functions, a model, or both.

    A function is a short name (`exact_match`, `maths_answer`, ...), the dotted path of your own, such as
    `mypackage.mymodule.brevity`, or the address of a service, such as `http://127.0.0.1:8000/score`. In
    Python it may be the function itself, if workers can import it.

    Raises:
        ValueError: a weight is not a finite number, a function is named twice, or workers cannot import one.

    Example:
        >>> RewardSpec(functions={"exact_match": 1.0, "length": -0.1}).weights({"data_source": "any"})
        {'exact_match': 1.0, 'length': -0.1}
    """

    functions: Functions = None
    """A function, a list of them, or a mapping of function to weight; exact_match where nothing is given."""
    by_source: Sources = field(default_factory=dict)
    """Mapping of data source to functions, in the same forms; they score such rows instead of `functions`."""
    model: ModelSpec | None = None
    """A reward model, whose score is added."""
    http: HTTPOptions = field(default_factory=HTTPOptions)
    """Options for services."""
    kind: Kind = "reward"
    """Whether it is a reward or a cost; a cost has no default function."""

    def __post_init__(self) -> None:
        for option, weights in [("functions", self.defaults()), *self.sources().items()]:
            for name, weight in weights.items():
                if not _is_finite(weight):
                    raise ValueError(
                        f"{self.kind} {option}: {name} has the weight {weight!r}. A weight is a finite "
                        "number, such as 1.0."
                    )

    def defaults(self) -> dict[str, float]:
        """Return the functions of rows whose data source is not in `by_source`."""
        if self.functions is None:
            scored = self.by_source or self.model is not None or self.kind == "cost"
            return {} if scored else {DEFAULT: 1.0}
        return function_weights(self.functions, option=f"{self.kind}.functions")

    def sources(self) -> dict[str, dict[str, float]]:
        """Return the functions of each data source in `by_source`."""
        return {source: self._of(source) for source in self.by_source}

    def weights(self, row: Mapping[str, object]) -> dict[str, float]:
        """Return the functions that score a row.

        Raises:
            ValueError: there are none, and no model either.
        """
        source = str(row.get("data_source", ""))
        weights = self._of(source) if source in self.by_source else self.defaults()
        if not weights and self.model is None:
            raise ValueError(
                f"{self.kind}: no function scores the data source {source!r}; by_source has: "
                f"{', '.join(self.by_source) or 'nothing'}. Add it there, or name functions for the others."
            )
        return weights

    def _of(self, source: str) -> dict[str, float]:
        """The functions of a data source that is in `by_source`."""
        return function_weights(self.by_source[source], option=f"{self.kind}.by_source")

    def names(self) -> list[str]:
        """Return all functions that are named, once each."""
        every = [self.defaults(), *self.sources().values()]
        return list(dict.fromkeys(name for weights in every for name in weights))


def _is_finite(weight: object) -> bool:
    return isinstance(weight, Real) and math.isfinite(weight)
