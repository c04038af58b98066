"""Where rows are read from, and which of them are held out for validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from rlhf_lightning.data.arrow import without_nulls
from rlhf_lightning.data.record import find
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
    """Files or data sets of training rows; validation rows are those of others, or the last of each."""

    path: list[str] | str
    val_path: list[str] | str | None = None
    val_rows: int = 0
    limit: int | None = None
    source_field: str | None = None
    """Where one of the two is a list, rows without this field are given it: the name of their own file."""
    given: RowSplit | None = None
    """Rows to use instead of those at `path`."""

    def __post_init__(self) -> None:
        for option, value in (("path", self.path), ("val_path", self.val_path)):
            if option == "val_path" and value is None:
                continue
            names = _several(value)
            if not names or not all(name and isinstance(name, str) for name in names):
                raise ValueError(
                    f"data.{option}={str(value)[:60]}: this is the name of a file or data set, or a list of "
                    "names. Rows in memory are given by PromptData.from_rows(rows, ...), and so for its "
                    "subclasses."
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
        """Names of the files or data sets, without folder and endings."""
        return "+".join(map(_stem, _several(self.path)))

    def read(self) -> RowSplit:
        """Return the rows of `path`, split where rows are held out.

        Raises:
            ValueError: a file is missing or damaged, or nothing is left to train on.
        """
        parts = [self._split(path) for path in _several(self.path)]
        held_out = [row for part in parts for row in part.held_out]
        name = " + ".join(part.train_name for part in parts)
        held_out_name = " + ".join(part.held_out_name for part in parts)
        if self.val_path is not None:
            paths = _several(self.val_path)
            found = [self._named(read_rows(path, option="data.val_path"), path) for path in paths]
            held_out, held_out_name = [row for rows in found for row in rows], " + ".join(paths)
        return RowSplit([row for part in parts for row in part.train], held_out, name, held_out_name)

    def _split(self, path: str) -> RowSplit:
        """The rows of one file, or those given: the first to train on, the last held out."""
        whole = None if self.val_rows else self.limit
        rows, held_out = self.given[:2] if self.given else (read_rows(path, limit=whole), [])
        if self.val_rows >= len(rows):
            raise ValueError(
                f"data.val_rows={self.val_rows}: {path} has {len(rows)} rows, none is left over. "
                f"Try --data.val_rows {len(rows) // 10}."
            )
        end, held_out_name = len(rows) - self.val_rows, path
        if self.val_rows:
            held_out, held_out_name = rows[end:], f"{path} (the last {self.val_rows} rows)"
        return RowSplit(
            self._named(rows[:end][: self.limit], path), self._named(held_out, path), path, held_out_name
        )

    def _named(self, rows: list[Row], path: str) -> list[Row]:
        field, source = self.source_field, _stem(path)
        if field is None or not (isinstance(self.path, list) or isinstance(self.val_path, list)):
            return rows
        return [row if find(row, field) is not None else {**row, field: source} for row in rows]


def _several(paths: object) -> list[str]:
    """The names that an option gives, one or a list of them."""
    return cast("list[str]", paths if isinstance(paths, list) else [paths])


def _stem(path: str) -> str:
    return Path(path.partition(":")[0]).name.partition(".")[0].partition("@")[0]


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
