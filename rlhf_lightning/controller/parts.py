"""Columns whose rows arrive in parts, in an order that is only known once they have arrived.

generator:   part 0 | part 1 | ...      each with one more column: the numbers of its rows in the batch
critic:        '---> part 0 | part 1    called once per part, with the same rows of every other column
controller:  batch["values"]            waits for all parts, and puts the rows back in order
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from rlhf_lightning.controller.block import encode
from rlhf_lightning.controller.column import Column


@dataclass(frozen=True, eq=False)
class Parts:
    """Which rows of a batch each part has; every row is in exactly one."""

    numbers: tuple[Column, ...]
    """For each part the numbers [n] int64 of its rows; n is known, the numbers may still be computed."""

    @cached_property
    def places(self) -> Column:
        """[B] int64: the position of each row among the joined parts; waits for all parts."""
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
        """A plain column with the rows in the order of the batch; waits until the order is known."""
        return Column.joined(self.columns).picked(self.parts.places)
