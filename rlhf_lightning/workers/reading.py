"""An actor that reads given answers, and was not said to draw its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlhf_lightning.controller import Batch, Caller
from rlhf_lightning.controller.register import Method


@dataclass(frozen=True)
class ReadingActor:
    """What receives the calls on the handle of an actor that reads at temperature 1: a step draws none."""

    drawing: Callable[[], str]
    """Names the method of the algorithm that runs and may draw none; empty in validations and callbacks."""
    workers: Caller
    """The actor's own."""

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        """See `Caller.call`.

        Raises:
            ValueError: a step draws answers, and would at another temperature than `sampling` says.
        """
        if method.name == "generate_sequences" and not arguments.get("greedy") and (by := self.drawing()):
            raise ValueError(
                f"{by} draws answers, and its `needs` has response_ids: they would be drawn at temperature "
                "1, whatever actor.sampling says, as given ones are read. Write `draws = True` in the class, "
                "or call generate_sequences(batch, greedy=True)."
            )
        return self.workers.call(method, batch, arguments)
