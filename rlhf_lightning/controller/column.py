"""A column of a Batch: pieces of blocks that lie wherever they were made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import is_
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from rlhf_lightning.controller.block import Block, Rows, decode, encode
from rlhf_lightning.controller.transport import Future, fetch_all

RowNumbers = npt.NDArray[np.int64]
_LAST_SPLIT = "_last_split"
"""Attribute in which a column caches the last edges that it was split at, and the result."""
_LAST_PLACED = "_last_placed"
"""Attribute in which a column caches the last result of `placed`."""


class Piece(NamedTuple):
    """Some rows of one block, which is in this process or the future of a device's result."""

    source: Future | Block
    rows: range | RowNumbers
    """A range (of step 1) where they are known to be contiguous."""

    def take(self, rows: RowNumbers) -> Piece:
        """Some of these rows, by their numbers within the piece."""
        return Piece(self.source, rows + self.rows.start if isinstance(self.rows, range) else self.rows[rows])

    def pick(self) -> Rows:
        """The rows as a slice where they are contiguous, which a device takes without a copy."""
        rows = self.rows
        if isinstance(rows, range):
            return slice(rows.start, rows.stop)
        if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
            return slice(int(rows[0]), int(rows[0]) + len(rows))
        return rows

    def block(self, found: Mapping[Future, object]) -> Block:
        """The rows' values, of the block in this process or of the fetched one."""
        source = found[self.source] if isinstance(self.source, Future) else self.source
        assert isinstance(source, Block)
        return source.take(self.pick())

    def shipped(self) -> tuple[Future | Block, Rows]:
        """What to send to a device, and which rows it takes of that; a block in this process is cut first."""
        if isinstance(self.source, Future):
            return self.source, self.pick()
        return self.source.take(self.pick()), slice(0, len(self.rows))


@dataclass(frozen=True)
class Column:
    """Rows of one name, in order."""

    pieces: tuple[Piece, ...]
    by: Column | None = None
    """Row numbers [n] int64, maybe still being computed: which rows of `pieces` these are. None: all."""

    @staticmethod
    def of(source: Future | Block, num_rows: int) -> Column:
        """All rows of one block."""
        return Column((Piece(source, range(num_rows)),))

    @staticmethod
    def of_pieces(pieces: Sequence[Piece]) -> Column:
        """All rows of these; empty pieces are dropped, but the first of all empty ones: it has the dtype."""
        return Column(tuple([piece for piece in pieces if len(piece.rows)]) or tuple(pieces[:1]))

    @staticmethod
    def joined(columns: Sequence[Column]) -> Column:
        """The rows of several columns, one after the other."""
        pieces = [piece for column in columns for piece in column.pieces]
        if all(column.by is None for column in columns):
            return Column.of_pieces(pieces)
        sizes = [sum(len(piece.rows) for piece in column.pieces) for column in columns]
        before = np.cumsum([0, *sizes[:-1]])
        rows = np.concatenate([start + c.row_numbers() for start, c in zip(before, columns, strict=True)])
        return Column(tuple(pieces)).picked(Column.of(encode(torch.from_numpy(rows)), len(rows)))

    def __len__(self) -> int:
        return self._num_rows

    @cached_property
    def _num_rows(self) -> int:
        return sum([len(piece.rows) for piece in self.pieces]) if self.by is None else len(self.by)

    @property
    def is_here(self) -> bool:
        """Whether all blocks, and the row numbers, are in this process's memory."""
        local = not any(isinstance(piece.source, Future) for piece in self.pieces)
        return local and (self.by is None or self.by.is_here)

    def row_numbers(self) -> RowNumbers:
        """Which rows of `pieces` these are; waits until the device has computed `by`."""
        found = torch.arange(len(self)) if self.by is None else self.by.fetch()
        assert isinstance(found, torch.Tensor)
        return found.numpy()

    def picked(self, by: Column) -> Column:
        """Like `take`, with row numbers [n] int64 that are themselves a column, and may not be known yet."""
        whole = self if self.by is None else Column(self.pieces).take(self.row_numbers())
        return Column(whole.pieces, by)

    def take(self, rows: RowNumbers) -> Column:
        """The given rows in the given order; runs from one block stay one piece."""
        if self.by is not None:
            return Column(self.pieces, self.by.take(rows))
        ends = np.cumsum([len(piece.rows) for piece in self.pieces])
        owner = np.searchsorted(ends, rows, side="right")
        cuts = np.flatnonzero(np.diff(owner)) + 1
        pieces = []
        for run in np.split(np.arange(len(rows)), cuts):
            index = int(owner[run[0]]) if len(run) else 0
            piece, before = self.pieces[index], int(ends[index]) - len(self.pieces[index].rows)
            pieces.append(piece.take(rows[run] - before))
        return Column(tuple(pieces))

    def split(self, edges: Sequence[int]) -> list[Column]:
        """The rows between neighbouring edges, from 0 to the last; cached, since calls mostly split alike."""
        kept = cast(tuple[Sequence[int], list[Column]] | None, self.__dict__.get(_LAST_SPLIT))
        if kept is None or kept[0] != edges:
            kept = self.__dict__[_LAST_SPLIT] = edges, self._split(edges)
        return kept[1]

    def _split(self, edges: Sequence[int]) -> list[Column]:
        """`split` without the cache, in one pass over pieces and parts."""
        if self.by is not None:
            return [Column(self.pieces, by) for by in self.by.split(edges)]
        sizes = [stop - start for start, stop in pairwise(edges)]
        if sizes == [len(piece.rows) for piece in self.pieces]:
            return [Column((piece,)) for piece in self.pieces]
        parts: list[list[Piece]] = [[] for _ in edges[1:]]
        part, before = 0, 0
        for piece in self.pieces:
            start, after = before, before + len(piece.rows)
            while start < after:
                if start >= edges[part + 1]:
                    part += 1
                    continue
                stop = min(after, edges[part + 1])
                parts[part].append(Piece(piece.source, piece.rows[start - before : stop - before]))
                start = stop
            before = after
        none = [Piece(piece.source, piece.rows[:0]) for piece in self.pieces[:1]]
        return [Column(tuple(found or none)) for found in parts]

    def placed(self, place: Callable[[Block], Future | Block]) -> Column:
        """The same rows, with each block in this process's memory replaced by `place(block)`.

        Where `place` gives the same again, so does this, and what the column caches serves again.
        """
        sources = [p.source if isinstance(p.source, Future) else place(p.source) for p in self.pieces]
        for known in (self, cast(Column, self.__dict__.get(_LAST_PLACED, self))):
            if all(map(is_, sources, [piece.source for piece in known.pieces])):
                return known
        pieces = tuple(map(Piece, sources, [piece.rows for piece in self.pieces]))
        found = self.__dict__[_LAST_PLACED] = Column(pieces, self.by)
        return found

    def fetch(self, name: str = "") -> torch.Tensor | list[object]:
        """The values [len(self), ...] in memory of their own: a tensor, or a list of Python objects.

        Args:
            name: of the column, for an error.
        """
        by = () if self.by is None else self.by.pieces
        futures = list({p.source for p in (*self.pieces, *by) if isinstance(p.source, Future)})
        found = dict(zip(futures, fetch_all(futures), strict=True))
        value = decode([p.block(found) for p in self.pieces], by=[p.block(found) for p in by], name=name)
        is_view = len(self.pieces) == 1 and self.by is None
        return value.clone() if isinstance(value, torch.Tensor) and is_view else value
