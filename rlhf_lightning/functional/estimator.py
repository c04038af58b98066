"""The contract of estimators, which make advantages from what the models return; they run where the data is.

    controller: estimator(columns of the whole batch)
    workers:    estimator(columns of this rank's rows, add_over_ranks) on every rank, no tensor fetched
Both give the same numbers: what is summed over the whole batch (whitening) is added up over the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import cast

from torch import Tensor

from rlhf_lightning.field_types import check_names
from rlhf_lightning.functional.aggregate import Loss
from rlhf_lightning.functional.reading import reading

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


def check_estimator(estimator: object) -> None:
    """Refuse what is no estimator, such as a function or the class of one, and texts for lists of columns.

    Raises:
        TypeError: it is none.
        ValueError: it names columns by one text.
    """
    if isinstance(estimator, Estimator):
        check_names(type(estimator).__name__, "columns", estimator.columns)
        check_names(type(estimator).__name__, "returns", estimator.returns)
        return
    name = getattr(estimator, "__name__", type(estimator).__name__)
    if isinstance(estimator, type) and issubclass(estimator, Estimator):
        raise TypeError(f"{name} is a class. Give one of it, {name}().")
    raise TypeError(
        f"{name} is not an estimator. Derive a frozen dataclass from rlhf_lightning.functional.Estimator, "
        "whose __call__ is what you have."
    )


def reads_reference(estimator: Estimator, loss: Loss) -> bool:
    """Whether the estimator or the loss of an actor reads the reference's log-probabilities."""
    check_estimator(estimator)
    return "ref_log_probs" in (*estimator.columns, *loss.columns)


def run_estimator(estimator: Estimator, rows: Mapping[str, Tensor], add: Add = alone) -> dict[str, Tensor]:
    """Call an estimator, built in or the user's own, and check what it returns.

    Raises:
        ValueError: it read a column that it does not name, returned others than it names in `returns`, or
            numbers that are not finite: each step with them would be skipped, and nothing learned.
    """
    whose = type(estimator).__name__
    with reading(whose, rows=rows):
        found: object = estimator(rows, add)
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{whose} returned a {type(found).__name__}: an estimator returns columns by name. Write "
            '`return {"advantages": advantages}`.'
        )
    if {*found} != {*estimator.returns}:
        raise ValueError(
            f"{whose} returned {sorted(found)}, and its `returns` names {sorted(estimator.returns)}. Let "
            "both name the same columns."
        )
    columns = _columns(whose, found, rows=len(next(iter(rows.values()), ())))
    _check_finite(whose, columns)
    return columns


def _columns(whose: str, found: Mapping[str, object], *, rows: int) -> dict[str, Tensor]:
    """What was returned, if it is a tensor of all rows under each name."""
    for name, column in found.items():
        if not (isinstance(column, Tensor) and column.shape[:1] == (rows,)):
            given = list(column.shape) if isinstance(column, Tensor) else type(column).__name__
            raise ValueError(
                f"{whose}: {name!r} is {given}. Make it a tensor [B, R] or [B] of the {rows} rows."
            )
    return cast(dict[str, Tensor], dict(found))


def _check_finite(whose: str, columns: Mapping[str, Tensor]) -> None:
    for name, column in columns.items():
        if not (finite := column.isfinite()).all():
            row = int((~finite).nonzero()[0, 0])
            value = float(column[row][~finite[row]].flatten()[0])
            raise ValueError(
                f"{whose}: row {row} of its rows has {value} in {name!r}, which is not finite. Look for a "
                "division by 0 or a logarithm of 0; where the mask is False, give 0."
            )
