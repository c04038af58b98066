"""Where rows are read from, and which of them are held out for validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlhf_lightning.data.arrow import without_nulls
from rlhf_lightning.data.rows import Row, read_rows

IN_MEMORY = "memory"
"""Path of rows that are given as objects, in messages and as their data source."""


class RowSplit(NamedTuple):
    """Raw rows for training and for validation."""

    train: list[Row]
    held_out: list[Row]
    """Validation rows; empty for none."""
    train_name: str
    """Where the training rows come from, for messages."""
    held_out_name: str
    """Where the validation rows come from, for messages."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """A file or data set of training rows; validation rows are those of another one, or its last rows.

    Raises:
        ValueError: an option is outside its range, or two exclude each other.
    """

    path: str
    val_path: str | None = None
    val_rows: int = 0
    limit: int | None = None
    given: RowSplit | None = None
    """Rows to use instead of those at `path`."""

    def __post_init__(self) -> None:
        given: object = self.path
        if isinstance(given, list | tuple) and all(isinstance(one, str) for one in given):
            raise ValueError(
                f"data.path={list(given)}: it is one file or data set. Write the rows of several into one "
                "file, each with a field data_source, by which rewards can differ. How often a row is "
                "drawn is how often it stands there, or what `draw` of a data module of your own says."
            )
        if not isinstance(self.path, str):
            raise ValueError(
                f"data.path is a {type(self.path).__name__}, and has to be a text. Rows in memory are given "
                "by PromptData.from_rows(rows, ...), and so for its subclasses."
            )
        if self.given is not None and self.given.held_out and (self.val_rows or self.val_path):
            raise ValueError("from_rows(held_out=...) with data.val_rows or data.val_path: give one of them.")
        if self.val_path is not None and self.val_rows:
            raise ValueError(
                f"data.val_path={self.val_path} and data.val_rows={self.val_rows}: give one of the two."
            )
        if self.val_rows < 0:
            raise ValueError(f"data.val_rows={self.val_rows}: use 0 to hold out nothing.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"data.limit={self.limit}: must be at least 1; leave it out to use all rows.")

    @property
    def stem(self) -> str:
        """Name of the file or data set, without folder and endings."""
        return Path(self.path.partition(":")[0]).name.partition(".")[0].partition("@")[0]

    def read(self) -> RowSplit:
        """Return the rows of `path`, split where rows are held out.

        Raises:
            ValueError: a file is missing or damaged, or nothing is left to train on.
        """
        rows, held_out, _, held_out_name = self.given or self._read()
        if self.val_path is not None:
            held_out, held_out_name = read_rows(self.val_path, option="data.val_path"), self.val_path
        elif self.val_rows:
            if self.val_rows >= len(rows):
                raise ValueError(
                    f"data.val_rows={self.val_rows}: {self.path} has {len(rows)} rows, none is left over. "
                    f"Try --data.val_rows {len(rows) // 10}."
                )
            rows, held_out = rows[: -self.val_rows], rows[-self.val_rows :]
            held_out_name = f"{self.path} (the last {self.val_rows} rows)"
        return RowSplit(
            train=rows[: self.limit], held_out=held_out, train_name=self.path, held_out_name=held_out_name
        )

    def _read(self) -> RowSplit:
        rows = read_rows(self.path, limit=None if self.val_rows else self.limit)
        return RowSplit(rows, [], self.path, self.path)


def listed(rows: Iterable[Mapping[str, object]]) -> list[Row]:
    """Shallow copies of rows as dicts.

    Raises:
        ValueError: a row is no mapping.
    """
    found, of_arrow = [], type(rows).__module__.partition(".")[0] == "datasets"
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise ValueError(
                f"{IN_MEMORY}, row {number}: is a {type(row).__name__}, and has to be a mapping of fields, "
                'such as {"prompt": "2 + 3 = ", "answer": "5"}.'
            )
        found.append(without_nulls(row) if of_arrow else dict(row))
    return found
