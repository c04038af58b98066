"""The contract of estimators, which make advantages from what the models return; they run where the data is.

    controller: estimator(columns of the whole batch)
    workers:    estimator(columns of this rank's rows, add_over_ranks) on every rank, no tensor fetched
Both give the same numbers: what is summed over the whole batch (whitening) is added up over the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor

Add = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes that hold rows of the batch."""


def alone(x: Tensor) -> Tensor:
    """The sum over one holder of all rows, the controller: the tensor itself."""
    return x


class Estimator(ABC):
    """A frozen, picklable function from columns of a batch to new columns, such as advantages."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Batch columns that it reads."""

    @property
    @abstractmethod
    def returns(self) -> tuple[str, ...]:
        """Columns that it makes."""

    @property
    def rows_together(self) -> int:
        """Neighbouring rows that are compared, and so stay on one rank: a whole group in GRPO."""
        return 1

    @abstractmethod
    def __call__(self, rows: Mapping[str, Tensor], add: Add = alone) -> dict[str, Tensor]:
        """Compute the new columns.

        Args:
            rows: the columns that it reads, [B, R] or [B].
            add: sums over all holders of rows; it must be called equally often on each.

        Returns:
            The columns named in `returns`, [B, R] or [B].
        """
