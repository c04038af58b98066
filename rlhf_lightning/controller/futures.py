"""What remote calls return beside a Batch: futures of plain values and of metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NoReturn, TypeVar, cast

from rlhf_lightning.controller.call import CallReport
from rlhf_lightning.controller.transport import Future, fetch_all

T = TypeVar("T")


class Value(Generic[T]):
    """A future of the plain value that one rank returns."""

    def __init__(self, report: Future, read: Callable[[object], T] | None = None) -> None:
        """Take the future of a call's report.

        Args:
            report: of the call.
            read: makes the value of what the rank returned; by default they are the same.
        """
        self._report = report
        self._read = read or (lambda returned: cast(T, returned))

    def fetch(self) -> T:
        """Wait for the value.

        Raises:
            WorkerError: the call, or another pending one, failed.
        """
        return _values([self])[0]


def _values(values: Sequence[Value[T]]) -> list[T]:
    reports = fetch_all([value._report for value in values])
    returned = [cast(CallReport, report).value for report in reports]
    return [value._read(one) for value, one in zip(values, returned, strict=True)]


class Gathered(Generic[T]):
    """Futures of the plain values of several ranks."""

    def __init__(self, values: Sequence[Value[T]]) -> None:
        self._values = tuple(values)

    def __len__(self) -> int:
        return len(self._values)

    def fetch(self) -> list[T]:
        """Wait for all values, in the order of the ranks.

        Raises:
            WorkerError: one of the calls, or another pending one, failed.
        """
        return _values(self._values)


Numbers = Mapping[str, float]
_LAST = ("/lr", "/skipped_steps")
"""Suffixes of metrics that are an optimizer's state: of several steps the last one counts, not the mean."""


class Metrics:
    """Named numbers, some of them still being computed.

    `a | b` has the metrics of both; either may be a plain mapping of numbers. A remote call contributes the
    mean over its data-parallel ranks. A name that several calls return, such as those of mini-batches, is
    averaged over the calls; for learning rates and counts of skipped steps the last call counts.
    """

    def __init__(self, calls: Iterable[Sequence[Value[Numbers] | Numbers]] = ()) -> None:
        self._calls = tuple(calls)

    @classmethod
    def of(cls, numbers: Numbers) -> Metrics:
        """Metrics of known numbers.

        Raises:
            TypeError: a value is not a single number.
        """
        return cls([[as_numbers(numbers)]])

    def __or__(self, other: Metrics | Numbers) -> Metrics:
        return Metrics(self._calls + _metrics(other)._calls)

    def __ror__(self, other: Numbers) -> Metrics:
        return _metrics(other) | self

    def __getitem__(self, name: str) -> NoReturn:
        """Refuse: reading them takes a wait for all.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"metrics[{name!r}]: wait for them first, metrics.fetch().get({name!r}, 0.0).")

    def __iter__(self) -> object:  # no Iterator: type checkers refuse it too
        """Refuse: a plain mapping that takes metrics by |= would wait for all of them.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "Metrics are joined by |, and do not go into a plain dict: begin with Metrics.of(numbers), as in "
            "Metrics.of(self.rollout_metrics(batch)) | update."
        )

    def moved(self, group: str, *, to: str) -> Metrics:
        """The same numbers with one group renamed: `critic/loss` becomes `cost_critic/loss`."""
        return Metrics([[_moved(numbers, group, to) for numbers in ranks] for ranks in self._calls])

    def fetch(self) -> dict[str, float]:
        """Wait once for all numbers: the mean over calls, or the last call's for an optimizer's state.

        Raises:
            WorkerError: one of the calls, or another pending one, failed.
        """
        pending = [v for ranks in self._calls for v in ranks if isinstance(v, Value)]
        fetched = dict(zip(pending, _values(pending), strict=True))
        per_call = [_mean([fetched[v] if isinstance(v, Value) else v for v in r]) for r in self._calls]
        last = {name: value for call in per_call for name, value in call.items() if name.endswith(_LAST)}
        return _mean(per_call) | last


def as_numbers(value: object) -> dict[str, float]:
    """What a method returned as metrics, as plain numbers.

    Raises:
        TypeError: it is no mapping, or a value is not a single number.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"returned {type(value).__name__}, not metrics, numbers by name.")
    return {name: _number(name, number) for name, number in value.items()}


def _metrics(numbers: Metrics | Numbers) -> Metrics:
    return numbers if isinstance(numbers, Metrics) else Metrics.of(numbers)


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as err:
        said = " ".join(str(value).split())[:60]
        raise TypeError(f"metric {name!r}: {said} is not a single number. Give its mean, say.") from err


def _moved(numbers: Value[Numbers] | Numbers, group: str, to: str) -> Value[Numbers] | Numbers:
    if isinstance(numbers, Value):
        return Value(numbers._report, lambda returned: _renamed(numbers._read(returned), group, to))
    return _renamed(numbers, group, to)


def _renamed(numbers: Numbers, group: str, to: str) -> Numbers:
    """The numbers, those of `group/...` as `to/...`."""
    return {
        f"{to}/{name.removeprefix(f'{group}/')}" if name.startswith(f"{group}/") else name: number
        for name, number in numbers.items()
    }


def _mean(rows: Sequence[Numbers]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: [float(row[name]) for row in rows if name in row] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}
