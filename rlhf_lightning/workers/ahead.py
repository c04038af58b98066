"""Generation that is ahead of learning: while the models learn from one batch, the next is answered.

call k      weights to the generator | rows of call k - 1, answered --> whoever learns
                                     | rows of call k           -----> generator, until call k + 1
partial:    what is not whole then waits in the generator's hands, with what it has said, for the next weights
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from rlhf_lightning.controller import GROUPS, Batch
from rlhf_lightning.controller.register import Method, methods_of
from rlhf_lightning.workers.actor import ANSWERS
from rlhf_lightning.workers.generator import Generator, SeparateGeneration, refuse_turns
from rlhf_lightning.workers.in_hand import COUNTS, NUMBERS, VERSIONS, Carry
from rlhf_lightning.workers.joining import joined, rows_together, trimmed

_OTHER_DRAW = 1 << 61
"""Added to a row's id for other answers to its prompt."""
_LAST = 1 << 62
"""Added to the number of a row that comes after all others."""


@dataclass
class Ahead(SeparateGeneration):
    """Generation whose answers are those of an earlier call, prompts and all; `handed_on` says which."""

    in_flight: Batch | None = None
    """The rows of which no answer was returned yet; given before the first call, those of a run before."""
    evaluates: Callable[[], bool] = lambda: False
    """Whether answers are for a validation: they are of the rows that are given, by the present weights."""
    calls: int = 0
    """Calls of this iteration that were ahead."""

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        """See `Caller.call`; greedy answers and those for a validation are not ahead: they wait for these.

        Raises:
            ValueError: the batches of two iterations differ in their number of rows.
        """
        if method.name != "generate_sequences" or arguments.get("greedy") or self.evaluates():
            return super().call(method, batch, arguments)
        assert batch is not None
        self.calls += 1
        return self.scored(self.handed_on(batch, arguments))

    def handed_on(self, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        """Answers of earlier rows, in exchange for new ones."""
        raise NotImplementedError


@dataclass
class GenerationAhead(Ahead):
    """As its base, one batch ahead: while the models learn from one, the next is answered by older weights.

    A call hands the generator its batch and returns the one before, prompts and all. The first is answered
    twice, for itself and for the second call; or the rows that were in flight are answered first.
    """

    pending: tuple[Batch, int] | None = None
    """What the next call returns, and the version of the weights behind it."""
    staleness: int = 0
    """How many versions the answers that were last returned are behind."""

    def handed_on(self, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        """See `Ahead.handed_on`."""
        if self.pending is None and self.in_flight is not None:
            _check_restored(self.in_flight, batch, batches=(1,))
            self.pending = self.answers(self.in_flight, arguments), self.version
        before, rows = self.pending, batch
        if before is None:
            before, rows = (self.answers(batch, arguments), self.version), _drawn_again(batch, 1)
        self.pending, self.in_flight = (self.answers(rows, arguments), self.version), rows
        found, version = before
        _check_size(batch, len(found))
        self.staleness = self.version - version
        return found

    def metrics(self) -> dict[str, float]:
        """`response/staleness` of the answers that were last returned."""
        return {"response/staleness": float(self.staleness)}


@dataclass
class PartialGeneration(Ahead):
    """As GenerationAhead, but the next batch is whichever rows end first, and the others are gone on with.

    The generator decodes as many rows at once as a batch has, out of twice as many: where one ends, the next
    begins, of a later batch if need be. Once a batch is whole the others pause, and go on at the next call by
    the weights that are new then. A row that would be learned from too late is waited for. Rows of a group
    are handed on together. Of twice as many rows those that the first call lacks are its own, drawn again;
    they come after all others.
    """

    max_staleness: int = 2
    """By how many versions the weights behind any token may be older than the generator's, at least 2."""
    pending: Batch | None = None
    """Answers that the next call returns, and numbers of their rows."""
    returned: tuple[Batch, int] | None = None
    """Which weights made the answers that were last returned, and the version then."""
    _numbers: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[n] int64, of the rows in flight."""
    _next: int = 0
    """Number of the next row."""

    def handed_on(self, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        """See `Ahead.handed_on`."""
        refuse_turns(arguments)
        self.synchronize()
        if self.pending is None:
            found, batch = self._first(batch)
        else:
            _check_size(batch, len(self.pending))
            found = self._collected()
        self._begin(batch)
        self.returned = found.select([*VERSIONS, *COUNTS]), self.version
        return found

    def _first(self, batch: Batch) -> tuple[Batch, Batch]:
        """The first answers, and what is begun after them."""
        restored, size = self.in_flight, len(batch)
        if restored is None:
            now, after, spare = batch, _drawn_again(batch, 1), batch.take([])
        else:
            _check_restored(restored, batch, batches=(1, 2))
            now, after, spare = restored.take(range(size)), batch, restored.take(range(size, len(restored)))
        self.in_flight = None
        if len(spare):
            self._hold(spare, first=size)
        else:
            self._hold(_drawn_again(batch, 2), first=_LAST)
        self._begin(now)
        self._next += len(spare)
        return self._collected(), after

    def _hold(self, rows: Batch, *, first: int) -> None:
        """Give the generator rows for which there is no hurry."""
        self._call("hold_sequences", rows, torch.arange(first, first + len(rows)))

    def _begin(self, rows: Batch) -> None:
        """Give the generator the rows of a call; it answers as many."""
        numbers = torch.arange(self._next, self._next + len(rows))
        self._next += len(rows)
        self.pending = self._call("carry_sequences", rows, numbers)

    def _call(self, name: str, rows: Batch, numbers: Tensor) -> Batch:
        carry = Carry(
            version=self.version, max_staleness=self.max_staleness, rows_together=rows_together(rows)
        )
        self.in_flight = rows if self.in_flight is None else joined([self.in_flight, rows])
        self._numbers = torch.cat([self._numbers, numbers])
        numbered = rows | {NUMBERS: numbers}
        return cast(Batch, self.generator.call(methods_of(Generator)[name], numbered, {"carry": carry}))

    def _collected(self) -> Batch:
        """The rows whose answers are whole, which are no longer in flight; waits for them."""
        pending, flying = self.pending, self.in_flight
        assert pending is not None
        assert flying is not None
        places = {number: place for place, number in enumerate(self._numbers.tolist())}
        rows = [places.pop(number) for number in pending[NUMBERS].tolist()]
        left = list(places.values())
        self.in_flight, self._numbers = flying.take(left), self._numbers[left]
        return trimmed(flying.take(rows)) | pending.select([*ANSWERS, *VERSIONS, *COUNTS])

    def metrics(self) -> dict[str, float]:
        """Of the answers that were last returned, how old they are and how many are of several weights."""
        if self.returned is None:
            return {}
        found, version = self.returned
        older, tokens = found["older_tokens"], found["num_tokens"]
        return {
            "response/staleness": float(version - found["weights_version"].min()),
            "response/carried": float((older > 0).float().mean()),
            "response/carried_tokens": float(older.sum() / tokens.sum().clamp(min=1)),
        }


def _drawn_again(batch: Batch, times: int) -> Batch:
    """The same rows, for other answers, in groups of their own."""
    ids = ("row_ids", GROUPS) if GROUPS in batch else ("row_ids",)
    return batch | {name: batch[name] + times * _OTHER_DRAW for name in ids}


def _check_size(batch: Batch, before: int) -> None:
    if len(batch) != before:
        raise ValueError(
            f"generation is one batch ahead, and a batch of {len(batch)} rows follows one of "
            f"{before}. Give batches of one size: a number of rows that batch_size divides."
        )


def _check_restored(restored: Batch, batch: Batch, *, batches: tuple[int, ...]) -> None:
    if (before := rows_together(restored)) != (now := rows_together(batch)):
        raise ValueError(
            f"the checkpoint has prompts in flight with {before} answers to each, and a batch has {now} to "
            "each. Continue with the algo.group_size of the run that wrote it."
        )
    sizes = [number * len(batch) for number in batches]
    if len(restored) not in sizes:
        raise ValueError(
            f"the checkpoint has {len(restored)} rows in flight, and a batch has {len(batch)}. Continue with "
            "the batch_size, and with the strategy.max_staleness, of the run that wrote it."
        )
