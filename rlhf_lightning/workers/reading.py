"""An actor that reads given answers, and an opponent that draws as it does, which were not said to draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlhf_lightning.controller import Batch, Caller
from rlhf_lightning.controller.register import Method


@dataclass(frozen=True)
class ReadingActor:
    """What receives the calls on the handle of a model that samples at temperature 1: a step draws none."""

    owner: str
    """The algorithm, for the message."""
    workers: Caller
    """The actor's own."""
    in_step: Callable[[], bool]
    """Says whether a step is running: validations, predictions and callbacks may draw."""

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        """See `Caller.call`.

        Raises:
            ValueError: a step draws answers, and would at another temperature than `sampling` says.
        """
        if method.name == "generate_sequences" and not arguments.get("greedy") and self.in_step():
            raise ValueError(
                f"{self.owner}.step draws answers, and its `needs` has response_ids: they would be drawn at "
                "temperature 1, whatever actor.sampling says, as given ones are read. Write `draws = True` "
                "in the class, or call generate_sequences(batch, greedy=True)."
            )
        return self.workers.call(method, batch, arguments)
