"""Reading rows from JSON (lines, plain or gzipped, or one array), Parquet, and Hugging Face data sets."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import zlib
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeVar, cast

from rlhf_lightning.data.arrow import without_nulls
from rlhf_lightning.extras import import_extra
from rlhf_lightning.names import meant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

T = TypeVar("T")
Row = dict[str, object]
"""One JSON object of the data."""

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
ARRAY_SUFFIX = ".json"
PARQUET_SUFFIX = ".parquet"
_FILES = {".jsonl", ".ndjson", ".gz", ARRAY_SUFFIX, PARQUET_SUFFIX, ".csv", ".tsv", ".txt"}
"""Endings of names that are files, and are not looked for on the hub."""
_FROM_CSV = (
    """python -c 'import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin)]' """
    "< {source} > {target}"
)
"""A command of the shell that makes JSON Lines of a table."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class Reference(NamedTuple):
    """A data set as it is written: `NAME[@SUBSET][:SPLIT]`, such as `openai/gsm8k@main:test`."""

    name: str
    subset: str | None
    split: str | None


def read_rows(path: str, *, option: str = "data.path", limit: int | None = None) -> list[Row]:
    """Read all rows, or the first few.

    Args:
        path: a .jsonl[.gz], .ndjson[.gz], .json or .parquet file, a directory of a Hugging Face data set, or
            a hub name; the last two may end in `@SUBSET` and `:SPLIT` (train where no split is given).
        option: what the user set to `path`, for messages.
        limit: read no more rows than this.

    Raises:
        ValueError: there is no such file or data set, it is damaged, or it holds no rows.
    """
    file = Path(path).expanduser()
    if file.is_file():
        rows = _read_file(file, option, limit)
    else:
        rows = _read_data_set(_parse_reference(path), path, option, limit)
    if not rows:
        raise ValueError(f"{option}={path}: it holds no rows. Give a file with at least one.")
    return rows


def _read_file(file: Path, option: str, limit: int | None) -> list[Row]:
    if file.name.endswith(ARRAY_SUFFIX) and _is_array(file):
        return _read_array(file)[:limit]
    if file.name.endswith((*JSON_SUFFIXES, ARRAY_SUFFIX)):
        return list(islice(_read_json_lines(file), limit))
    if file.name.endswith(PARQUET_SUFFIX):
        return _read_parquet(file, option, limit)
    known, convert = ", ".join((*JSON_SUFFIXES, ARRAY_SUFFIX, PARQUET_SUFFIX)), ""
    if file.suffix.lower() == ".csv":
        source, target = (shlex.quote(str(path)) for path in (file, file.with_suffix(".jsonl")))
        convert = " Lists of messages are texts in it, to be read with json.loads. Convert it: "
        convert += _FROM_CSV.format(source=source, target=target)
    raise ValueError(
        f"{option}={file}: the name ends in {file.suffix or 'nothing'!r}, so its format is unknown. "
        f"Give a file whose name ends in {known}.{convert}"
    )


def _is_array(file: Path) -> bool:
    with file.open("rb") as beginning:
        return beginning.read(99).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _read_array(file: Path) -> list[Row]:
    rows = cast("list[object]", _parse(file.read_bytes(), str(file)))
    if wrong := [number for number, row in enumerate(rows, start=1) if not isinstance(row, dict)]:
        kind = type(rows[wrong[0] - 1]).__name__
        raise ValueError(f"{file}, row {wrong[0]}: a row is a JSON object, this is a {kind}.")
    return cast("list[Row]", rows)


def _read_json_lines(file: Path) -> Iterator[Row]:
    with _open(file) as lines:
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(line, f"{file}:{number}")
        except (EOFError, gzip.BadGzipFile, zlib.error) as err:
            raise ValueError(
                f"{file}:{number + 1}: the gzip stream is damaged ({err}). Make or download it again."
            ) from err


def _open(file: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(file, "rb")) if file.suffix == ".gz" else file.open("rb")


def _parse_line(line: bytes, where: str) -> Row:
    row = _parse(line, where)
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row is a JSON object, this line holds a {type(row).__name__}.")
    return row


def _parse(text: bytes, where: str) -> object:
    try:
        found: object = json.loads(text.decode("utf-8-sig").rstrip())
    except UnicodeDecodeError as err:
        raise ValueError(
            f"{where}: byte {err.start + 1} of the line is not UTF-8. Save the file as UTF-8."
        ) from err
    except json.JSONDecodeError as err:
        line = err.doc.split("\n")[err.lineno - 1]
        place = f"{where}, line {err.lineno}" if err.lineno > 1 else where
        raise ValueError(
            f"{place}: not JSON ({err.msg}, column {err.colno}): {line.strip()[:60]!r}. "
            "Correct or remove the line."
        ) from err
    return found


def _read_parquet(file: Path, option: str, limit: int | None) -> list[Row]:
    parquet = import_extra("pyarrow.parquet", extra="data", purpose=f"{option}={file} (a Parquet file)")
    try:
        table = parquet.read_table(file)
    except (OSError, ValueError) as err:  # pyarrow's ArrowInvalid is a ValueError
        raise ValueError(f"{option}={file}: not a Parquet file that can be read ({err}).") from err
    return [without_nulls(row) for row in table.slice(0, limit).to_pylist()]


def _parse_reference(path: str) -> Reference:
    name, _, split = path.partition(":")
    name, _, subset = name.partition("@")
    return Reference(name, subset or None, split or None)


def _read_data_set(reference: Reference, path: str, option: str, limit: int | None) -> list[Row]:
    directory = Path(reference.name).expanduser()
    if not directory.is_dir() and (directory.suffix in _FILES or not _HUB_NAME.fullmatch(reference.name)):
        raise ValueError(_missing(path, option))
    datasets = import_extra("datasets", extra="data", purpose=f"{option}={path} (a Hugging Face data set)")
    saved = (directory / "dataset_dict.json").exists() or (directory / "state.json").exists()
    try:
        if saved:
            loaded = datasets.load_from_disk(str(directory))
        else:
            loaded = datasets.load_dataset(
                str(directory.resolve()) if directory.is_dir() else reference.name, reference.subset
            )
    except datasets.exceptions.DatasetGenerationError as err:  # it says only that it is one; why is its cause
        reason = shorten(str(err.__cause__ or err), 300)
        raise ValueError(
            f"{option}={path}: its files make no one table ({reason}). Repair those that are damaged; of "
            "files with other columns give one alone."
        ) from err
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as err:
        reason = str(err).splitlines()[0] if str(err) else type(err).__name__
        prefix = f"{option}={path}:" if directory.is_dir() else f"{_missing(path, option)} By that name,"
        instead = " Type a file of rows, or another directory." if directory.is_dir() else ""
        raise ValueError(f"{prefix} no data set could be loaded ({reason}).{instead}") from err
    single = isinstance(loaded, datasets.Dataset)
    if saved:
        _check_saved(reference, loaded.split if single else reference.split, given=f"{option}={path}")
    split = loaded if single else _pick_split(loaded, reference.split, path, option)
    count = len(split) if limit is None else min(limit, len(split))
    return [without_nulls(row) for row in split.select(range(count)).to_list()]


def _check_saved(reference: Reference, split: object, *, given: str) -> None:
    """Refuse a subset of a data set that was saved, and another split than the one that was saved alone."""
    if reference.subset:
        raise ValueError(
            f"{given}: what save_to_disk wrote has no subsets. Leave @{reference.subset} out, or type the "
            "directory of that subset."
        )
    if reference.split and reference.split != str(split):
        held = f"{split} alone" if split else "one split alone, without a name"
        raise ValueError(
            f"{given}: the directory holds {held}. Leave :{reference.split} out, or type the directory of "
            "that split."
        )


def _pick_split(splits: Mapping[str, T], wanted: str | None, path: str, option: str) -> T:
    if wanted is None and len(splits) == 1:
        return next(iter(splits.values()))
    name = wanted or "train"
    if name not in splits:
        raise ValueError(
            f"{option}={path}: the data set has no split {name!r}; it has: {', '.join(splits)}. "
            f"Try {option}={path.partition(':')[0]}:{next(iter(splits), 'SPLIT')}."
        )
    return splits[name]


def _missing(path: str, option: str) -> str:
    """Say what is not there, and what lies beside it."""
    parent = Path(path).expanduser().parent
    if not parent.is_dir():
        return f"{option}={path}: no such file; the directory {parent} does not exist either."
    beside = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    listed = ", ".join(beside[:10]) + (f" and {len(beside) - 10} more" if len(beside) > 10 else "")
    close = get_close_matches(Path(path).name, beside, n=1)
    near = meant(*(str(parent / name) for name in close))
    return f"{option}={path}: no such file. Beside it lie: {listed or 'no files'}.{near}"
