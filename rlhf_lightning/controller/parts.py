"""Columns whose rows come in parts, in an order that is known only when they are there.

generator:   part 0 | part 1 | ...      each with the numbers of its rows in the batch, as one more column
critic:        '---> part 0 | part 1    called once a part, with those rows of every other column
controller:  batch["values"]            the first that waits for all parts: the rows are in order again
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from rlhf_lightning.controller.block import encode
from rlhf_lightning.controller.column import Column


@dataclass(frozen=True, eq=False)
class Parts:
    """Which rows of a batch each part has; every row is in one."""

    numbers: tuple[Column, ...]
    """[n] int64 of each part, where n is known and the numbers may still be computed."""

    @cached_property
    def places(self) -> Column:
        """[B] int64: where each row of the batch is among the joined parts; waits for all of them."""
        order = Column.joined(self.numbers).fetch()
        assert isinstance(order, torch.Tensor)
        return Column.of(encode(order.argsort()), len(order))


@dataclass(frozen=True)
class PartedColumn:
    """A column of a batch in parts."""

    parts: Parts
    columns: tuple[Column, ...]
    """The rows of each part, in its order."""

    def __len__(self) -> int:
        return sum(map(len, self.columns))

    def settled(self) -> Column:
        """The rows in the order of the batch; waits until it is known."""
        return Column.joined(self.columns).picked(self.parts.places)
