"""Generation one batch ahead: while the models learn from one batch, the generator answers the next.

call k      sends the current weights to the generator,
            returns the rows of call k - 1 with their answers, and
            gives the rows of call k to the generator, which answers them until call k + 1
partial     answers that are unfinished at call k + 1 are continued by its weights, not waited for
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from rlhf_lightning.controller import GROUPS, ORIGINS, Batch, Caller
from rlhf_lightning.controller.register import Method, methods_of
from rlhf_lightning.workers.actor import ANSWERS
from rlhf_lightning.workers.generator import Generator, SeparateGeneration, refuse_turns
from rlhf_lightning.workers.in_hand import COUNTS, NUMBERS, VERSIONS, Carry
from rlhf_lightning.workers.joining import joined, rows_together, trimmed

_OTHER_DRAW = 1 << 61
"""Added to a row's id so that its prompt is answered differently."""
_LAST = 1 << 62
"""Added to the numbers of rows that are to be answered after all others."""


@dataclass
class Ahead(SeparateGeneration, ABC):
    """Generation in which a call returns rows of an earlier call, prompts and answers; see `exchanged`."""

    in_flight: Batch | None = None
    """Rows whose answers were not returned yet. Set before the first call: those of a checkpoint."""
    is_validating: Callable[[], bool] = lambda: False
    """Says whether this is a validation, which needs the given rows answered by the current weights."""
    called: bool = False
    """Whether a call of this iteration has returned earlier rows; at most one may."""
    others: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    """Other actors' answers of this step: the name, and the columns of what was given."""

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        """See `Caller.call`; greedy answers and those for a validation are of the given rows.

        Raises:
            ValueError: the batches of two iterations differ in their number of rows, or one iteration calls
                a second time, or after another actor that has answered the rows which it exchanges, or with
                a `sampling` of its own.
        """
        if method.name != "generate_sequences" or arguments.get("greedy") or self.is_validating():
            return super().call(method, batch, arguments)
        assert batch is not None
        if self.called:
            raise ValueError(
                "generate_sequences: it is called a second time in an iteration (calls before the first one "
                "count), and generation that is a batch ahead answers each call with the rows of the one "
                "before. Try --strategy openrlhf, which answers at once, or draw the second time with "
                "a field `older: Opponent = field(default_factory=Opponent)`, a copy of the actor as the "
                "iteration began."
            )
        if arguments.get("sampling") is not None:
            raise ValueError(
                "generate_sequences(sampling=...): generation is a batch ahead, and the answers that this "
                "call returns were drawn before it. Type --algo.actor.sampling, by which all are drawn, or "
                "try --strategy openrlhf, which answers at once."
            )
        self.called = True
        self._check_others(batch)
        return self.with_log_probs(self.exchanged(batch, arguments))

    def end_step(self) -> None:
        """Begin the next iteration, which may call once more."""
        self.called = False
        self.others.clear()

    def _check_others(self, batch: Batch) -> None:
        """Refuse to exchange rows that another actor has answered, unless they have got columns since."""
        for name, given in self.others:
            if given.issuperset({*batch} - {GROUPS, ORIGINS}):  # which `answers_to` adds
                raise ValueError(
                    f"generate_sequences: {name} has answered this batch before actor, which is a batch "
                    f"ahead and returns the rows of the one before, to other prompts. Let {name} answer "
                    "what actor returns, or give the batch what it said, as columns, before actor is called; "
                    "or try --strategy openrlhf, which answers at once."
                )

    @abstractmethod
    def exchanged(self, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        """Give the generator new rows, and return earlier ones with their answers."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Numbers about the answers that were last returned, for loggers."""


@dataclass(frozen=True)
class OtherActor:
    """What receives the calls on another actor's handle: it notes which rows a step has answered at once."""

    name: str
    """Of the role."""
    workers: Caller
    """The role's own."""
    ahead: Ahead
    """Whose rows are exchanged."""
    is_stepping: Callable[[], bool]
    """Says whether a step runs: what hooks and callbacks have answered is no batch of a step."""

    def call(self, method: Method, batch: Batch | None, arguments: Mapping[str, object]) -> object:
        """See `Caller.call`."""
        if method.name == "generate_sequences" and batch is not None and self.is_stepping():
            self.ahead.others.append((self.name, frozenset(batch)))
        return self.workers.call(method, batch, arguments)


@dataclass
class GenerationAhead(Ahead):
    """Whole batches, one ahead: the models learn from one while older weights answer the next.

    A call gives the generator its batch and returns the previous one. The first call has no previous one: it
    returns rows that a checkpoint had in flight, else it answers its own batch twice, once for itself and
    once, with other draws, for the second call.
    """

    pending: tuple[Batch, int] | None = None
    """What the next call returns, and the version of the weights that answers it."""
    staleness: int = 0
    """Versions between the weights of the answers last returned and the generator's."""

    def exchanged(self, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        """See `Ahead.exchanged`."""
        if self.pending is None and self.in_flight is not None:
            _check_restored(self.in_flight, batch, batches=(1,))
            self.pending = self.answered(self.in_flight, arguments), self.version
        before, rows = self.pending, batch
        if before is None:
            before, rows = (self.answered(batch, arguments), self.version), _drawn_again(batch, 1)
        self.pending, self.in_flight = (self.answered(rows, arguments), self.version), rows
        found, version = before
        _check_size(batch, len(found))
        self.staleness = self.version - version
        return found

    def metrics(self) -> dict[str, float]:
        """`response/staleness` of the answers that were last returned."""
        return {"response/staleness": float(self.staleness)}


@dataclass
class PartialGeneration(Ahead):
    """One batch ahead, but the next batch is whichever rows finish first; the others are continued later.

    The generator holds twice as many rows as a batch has, and decodes as many at once as a batch has: where
    one ends, the next begins. Once enough rows for a batch are finished the others pause, and continue at the
    next call with the weights of then. A row that would become too stale is waited for. Rows of a group are
    returned together. The first call has only one batch: it fills the second half with its own rows again, to
    be answered by other draws, after all other rows.
    """

    max_staleness: int = 2
    """Most versions by which the weights behind any token may be older than the generator's, at least 2."""
    pending: Batch | None = None
    """Answers that the next call returns, with the numbers of their rows."""
    returned: tuple[Batch, int] | None = None
    """Of the answers last returned, the columns on their weights, and the version at that time."""
    _numbers: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Numbers of the rows in flight: [n] int64."""
    _next: int = 0
    """Number of the next new row."""

    def exchanged(self, batch: Batch, arguments: Mapping[str, object]) -> Batch:
        """See `Ahead.exchanged`."""
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
        """The first batch with answers, and the rows to begin after it."""
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
        """Give the generator rows that no call waits for yet."""
        self._call("hold_sequences", rows, torch.arange(first, first + len(rows)))

    def _begin(self, rows: Batch) -> None:
        """Give the generator the rows of a call; `pending` will hold as many answers."""
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
        """Wait for the pending answers, and return their rows, which are then no longer in flight."""
        pending, flying = self.pending, self.in_flight
        assert pending is not None
        assert flying is not None
        places = {number: place for place, number in enumerate(self._numbers.tolist())}
        rows = [places.pop(number) for number in pending[NUMBERS].tolist()]
        left = list(places.values())
        self.in_flight, self._numbers = flying.take(left), self._numbers[left]
        return trimmed(flying.take(rows)) | pending.select([*ANSWERS, *VERSIONS, *COUNTS])

    def metrics(self) -> dict[str, float]:
        """How stale the last answers are, and the shares of answers and of tokens that were carried over."""
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
    """The same prompts as new rows: with other ids, and so other answers, in groups of their own."""
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
            "each. Continue with the algorithm, and its algo.group_size, of the run that wrote it."
        )
    sizes = [number * len(batch) for number in batches]
    if len(restored) not in sizes:
        raise ValueError(
            f"the checkpoint has {len(restored)} rows in flight, and a batch has {len(batch)}. Continue with "
            "the batch_size, and with the strategy.max_staleness, of the run that wrote it."
        )
