"""A column of a Batch: pieces of blocks that lie wherever they were made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rlhf_lightning.controller.block import Block, Rows, decode
from rlhf_lightning.controller.transport import Future

RowNumbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Some rows of one block; the block is here, or the future of one that a device makes."""

    source: Future | Block
    rows: RowNumbers

    def pick(self) -> Rows:
        """The rows as a slice where they are contiguous, which a device takes without a copy."""
        if len(self.rows) and np.array_equal(
            self.rows, np.arange(self.rows[0], self.rows[0] + len(self.rows))
        ):
            return slice(int(self.rows[0]), int(self.rows[0]) + len(self.rows))
        return self.rows

    def shipped(self) -> tuple[Future | Block, Rows]:
        """What to send to a device, and which rows it takes of that: a block that is here is cut first."""
        if isinstance(self.source, Future):
            return self.source, self.pick()
        return self.source.take(self.pick()), slice(0, len(self.rows))

    def block(self) -> Block:
        """The rows themselves, fetched where they are elsewhere."""
        source = self.source.fetch() if isinstance(self.source, Future) else self.source
        assert isinstance(source, Block)
        return source.take(self.pick())


@dataclass(frozen=True)
class Column:
    """Rows of one name, in order."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def of(source: Future | Block, num_rows: int) -> Column:
        """All rows of one block."""
        return Column((Piece(source, np.arange(num_rows)),))

    @staticmethod
    def joined(columns: Sequence[Column]) -> Column:
        """The rows of several columns, one after the other; empty pieces are dropped while a row is left."""
        pieces = tuple(piece for column in columns for piece in column.pieces)
        return Column(tuple(piece for piece in pieces if len(piece.rows)) or pieces[:1])

    def __len__(self) -> int:
        return sum(len(piece.rows) for piece in self.pieces)

    def take(self, rows: RowNumbers) -> Column:
        """The given rows in the given order; runs from one block stay one piece."""
        ends = np.cumsum([len(piece.rows) for piece in self.pieces])
        owner = np.searchsorted(ends, rows, side="right")
        cuts = np.flatnonzero(np.diff(owner)) + 1
        pieces = []
        for run in np.split(np.arange(len(rows)), cuts):
            index = int(owner[run[0]]) if len(run) else 0
            piece, before = self.pieces[index], int(ends[index]) - len(self.pieces[index].rows)
            pieces.append(Piece(piece.source, piece.rows[rows[run] - before]))
        return Column(tuple(pieces))

    def fetch(self) -> torch.Tensor | list[object]:
        """The values [len(self), ...] in this process: a tensor, or a list for a column of Python objects."""
        return decode([piece.block() for piece in self.pieces])
