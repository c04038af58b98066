"""Batch: columns of futures over the same rows, what every remote call takes and returns.

actor.generate_sequences ---> Batch{response_ids: future, ...} ---> critic.compute_values
                                 |  no value comes here
                                 '--- batch["rewards"]: this one column is fetched
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import NoReturn

import numpy as np
import torch

from rlhf_lightning.controller.block import Block, Values, encode, is_number
from rlhf_lightning.controller.column import Column, RowNumbers
from rlhf_lightning.controller.parts import PartedColumn, Parts
from rlhf_lightning.controller.transport import Future
from rlhf_lightning.names import meant
from rlhf_lightning.parallel.shares import edges


class Batch:
    """Named columns over the same rows; immutable, so that a view costs only its row numbers.

    A remote call returns one at once. `batch["rewards"]` fetches that one column as a tensor on the host;
    `a | b` joins the columns of two batches over the same rows (b wins), and b may be a dictionary of values;
    `take`, `split`, `repeat` are views.

    Example:
        >>> batch = Batch.of({"prompt_ids": torch.zeros(4, 8, dtype=torch.int64)})
        >>> len(batch), list(batch), batch["prompt_ids"].shape
        (4, ['prompt_ids'], torch.Size([4, 8]))
    """

    def __init__(self, columns: Mapping[str, Column | PartedColumn], *, num_rows: int) -> None:
        """Take columns of equal length.

        Raises:
            ValueError: a column has another number of rows than `num_rows`.
        """
        wrong = {name: len(column) for name, column in columns.items() if len(column) != num_rows}
        if wrong:
            raise ValueError(f"a batch of {num_rows} rows cannot hold columns of other lengths: {wrong}.")
        self._columns = dict(columns)
        self._num_rows = num_rows

    @classmethod
    def trusted(cls, columns: dict[str, Column | PartedColumn], num_rows: int) -> Batch:
        """A batch of columns known to have `num_rows` rows: skips the check, since every call makes many."""
        batch = cls.__new__(cls)
        batch._columns, batch._num_rows = columns, num_rows
        return batch

    @classmethod
    def of(cls, values: Mapping[str, Values]) -> Batch:
        """A batch of copies of values: tensors or arrays [B, ...] in this process, or lists of B objects.

        Raises:
            ValueError: the values differ in length, there are none, or one is a single number or a mapping.
            TypeError: they have no names, such as what a plain DataLoader yields.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f"a {type(values).__name__} is not a batch: a batch is columns by name, such as prompt_ids. "
                "Data modules make them: trainer.fit(..., datamodule=PromptData(path=...)), or of rows in "
                "memory PromptData.from_rows(rows)."
            )
        if not values:
            raise ValueError("Batch.of({}): give at least one column, so that the number of rows is known.")
        _check_columns(values)
        blocks = {name: encode(_copied(value)) for name, value in values.items()}
        first = len(next(iter(blocks.values())))
        return cls({name: Column.of(block, len(block)) for name, block in blocks.items()}, num_rows=first)

    @classmethod
    def joined(cls, parts: Sequence[Batch]) -> Batch:
        """The rows of several batches one after the other, with the columns that all of them have.

        Raises:
            ValueError: there is no batch, or all have columns and none in common.
        """
        if not parts:
            raise ValueError("Batch.joined([]): give at least one batch, so that the columns are known.")
        names = [name for name in parts[0] if all(name in part for part in parts)]
        if not names and all(map(list, parts)):
            raise ValueError(f"Batch.joined: {', '.join(map(repr, parts))} have no column in common.")
        columns = {name: Column.joined([part.column(name) for part in parts]) for name in names}
        return cls(columns, num_rows=sum(len(part) for part in parts))

    @classmethod
    def in_parts(cls, parts: Parts, batches: Sequence[Batch]) -> Batch:
        """A batch made of one batch for each part; whatever needs the order of its rows waits for it."""
        columns = {name: PartedColumn(parts, tuple(b.column(name) for b in batches)) for name in batches[0]}
        return cls(columns, num_rows=sum(map(len, batches)))

    @property
    def parts(self) -> Parts | None:
        """The parts that its parted columns share; None where no column is parted, or they differ."""
        found = {c.parts for c in self._columns.values() if isinstance(c, PartedColumn)}
        return found.pop() if len(found) == 1 else None

    def part(self, index: int) -> Batch:
        """The rows of one of its parts, without waiting for them."""
        parts = self.parts
        assert parts is not None
        numbers = parts.numbers[index]
        columns = {
            name: column.columns[index] if isinstance(column, PartedColumn) else column.picked(numbers)
            for name, column in self._columns.items()
        }
        return Batch(columns, num_rows=len(numbers))

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __repr__(self) -> str:
        return f"Batch({self._num_rows} rows: {', '.join(self._columns)})"

    def column(self, name: str) -> Column:
        """One column, without fetching its values; a parted column waits for the order of its rows.

        Raises:
            KeyError: there is no such column; the message lists those there are.
        """
        found = self._held(name)
        return found.settled() if isinstance(found, PartedColumn) else found

    def _held(self, name: str) -> Column | PartedColumn:
        try:
            return self._columns[name]
        except (KeyError, TypeError):
            self._refuse(name)

    def _refuse(self, name: object) -> NoReturn:
        if not isinstance(name, str):
            raise TypeError(
                f"batch[{type(name).__name__}]: columns are read by name. Rows are taken by "
                "batch.take(numbers), those of a mask by batch.take(np.flatnonzero(mask))."
            ) from None
        near = get_close_matches(name, self._columns, n=1)
        raise KeyError(
            f"no column {name!r} in this batch; it has {sorted(self._columns)}.{meant(*near)}"
        ) from None

    def is_here(self, name: str) -> bool:
        """Whether a column's values are in this process's memory, so that reading them waits for no device.

        Raises:
            KeyError: there is no such column.
        """
        found = self._held(name)
        return isinstance(found, Column) and found.is_here

    def __getitem__(self, name: str) -> torch.Tensor:
        """Fetch a copy of one column of numbers [B, ...] to the host; changing it changes no batch.

        Raises:
            KeyError: there is no such column.
            TypeError: the column holds Python objects, use `objects`; or it is no name, but rows.
        """
        value = self.column(name).fetch(name)
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"column {name!r} is a list of Python objects: read it with batch.objects({name!r}). Numbers "
                f"to compute with are added as a tensor: batch | {{{name!r}: torch.tensor(...)}}."
            )
        return value

    def objects(self, name: str) -> list[object]:
        """Fetch one column of Python objects, B long."""
        value = self.column(name).fetch(name)
        return list(value)

    def fetch(self) -> dict[str, torch.Tensor | list[object]]:
        """Fetch all columns, by name: what `Batch.of` takes, and a checkpoint."""
        return {name: self.column(name).fetch() for name in self}

    def __or__(self, other: Batch | Mapping[str, Values]) -> Batch:
        """The columns of both; `other`, which may be a mapping of values, wins where both have a name."""
        theirs = other if isinstance(other, Batch) else Batch.of(other)
        return Batch({**self._columns, **theirs._columns}, num_rows=self._num_rows)

    def __setitem__(self, name: str, value: object) -> NoReturn:
        """Refuse: other batches share the columns.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a batch is never changed. Make one with the column: batch |= {{{name!r}: values}}.")

    def select(self, names: Iterable[str]) -> Batch:
        """Only these columns."""
        return Batch({name: self._held(name) for name in names}, num_rows=self._num_rows)

    def renamed(self, names: Mapping[str, str]) -> Batch:
        """The same rows with columns renamed; a column that had a new name is replaced.

        Args:
            names: new name by old name.
        """
        moved = {new: self._held(old) for old, new in names.items()}
        rest = {name: column for name, column in self._columns.items() if name not in names}
        return Batch({**rest, **moved}, num_rows=self._num_rows)

    def with_sources(self, place: Callable[[Block], Future | Block]) -> Batch:
        """The same rows, with each block in this process's memory replaced by `place(block)`."""
        columns = {
            name: column.placed(place) if isinstance(column, Column) else column
            for name, column in self._columns.items()
        }
        return Batch(columns, num_rows=self._num_rows)

    def take(self, rows: Sequence[int] | RowNumbers) -> Batch:
        """The given rows, in the given order, without fetching anything.

        Raises:
            IndexError: a row is not there.
            TypeError: they are no row numbers [n], such as a mask or what its `nonzero()` gives.
        """
        given = np.asarray(rows)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise TypeError(
                f"take({given.dtype} {list(given.shape)}): wants row numbers [n]. Of a mask type "
                "np.flatnonzero(mask)."
            )
        index = given.astype(np.int64)
        if len(index) and not 0 <= index.min() <= index.max() < len(self):
            raise IndexError(f"rows {index.min()} to {index.max()} of a batch of {len(self)}.")
        return Batch({name: self.column(name).take(index) for name in self._columns}, num_rows=len(index))

    def num_groups(self, together: int) -> int:
        """How many groups of so many neighbours there are.

        Raises:
            ValueError: the rows are no whole groups of that size.
        """
        groups, rest = divmod(len(self), together)
        if rest:
            raise ValueError(
                f"{len(self)} rows are no whole groups of {together} neighbours: {rest} are left over. "
                f"Give a multiple of {together}."
            )
        return groups

    def split(self, parts: int, *, together: int = 1) -> list[Batch]:
        """Contiguous parts whose sizes differ by at most one row; any number of rows will do, 0 too.

        Args:
            parts: how many.
            together: rows of a group, neighbours that stay in one part: a pair, or answers to one prompt.

        Raises:
            ValueError: the rows are no whole groups of that size.
        """
        ends = [edge * together for edge in edges(self.num_groups(together), parts)]
        columns = {name: self.column(name).split(ends) for name in self._columns}
        return [
            Batch.trusted({name: found[part] for name, found in columns.items()}, stop - start)
            for part, (start, stop) in enumerate(pairwise(ends))
        ]

    def repeat(self, times: int) -> Batch:
        """Each row `times` times, copies side by side: rows 0 0 0 1 1 1 for times = 3."""
        return self.take(np.repeat(np.arange(len(self)), times))


def _copied(value: Values) -> Values:
    """The same numbers in memory of their own: calls read them later, and callers may write there."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.detach().clone(memory_format=torch.contiguous_format)
    return value.copy() if isinstance(value, np.ndarray) else value


def _check_columns(values: Mapping[str, Values]) -> None:
    """Refuse what stands in the place of columns: one number for all rows, and a dict of lists for `rows`."""
    if single := [name for name, value in values.items() if is_number(value)]:
        raise ValueError(
            f"column {single[0]!r} is one number: give one for each row. Of x make "
            "torch.full((len(batch),), x)."
        )
    if tables := [name for name, value in values.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"column {tables[0]!r} is a {type(values[tables[0]]).__name__} and no list of rows, as a "
            "DataLoader joins dicts: give it a collate_fn that puts each row's dict into a list."
        )
