"""Reads what loggers have written: TensorBoard's events, CSV, and the file of an offline wandb run."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from wandb.proto.wandb_internal_pb2 import Record

Metrics = Mapping[str, list[float]]
"""Values in the order of the steps, by name."""


class Item(Protocol):
    """One value of a wandb record."""

    key: str
    nested_key: Iterable[str]
    value_json: str


_BLOCK = 32768
_HEADER = struct.Struct("<IHB")
_FILE_HEADER_BYTES = 7
_WHOLE, _FIRST, _LAST = 1, 2, 4


def tensorboard(root: Path) -> Metrics:
    """Scalars of all event files below a directory."""
    found: dict[str, list[float]] = {}
    for file in sorted(root.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend(event.value for event in events.Scalars(name))
    return found


def csv_file(root: Path) -> Metrics:
    """Columns of the one metrics.csv below a directory, without empty cells."""
    (file,) = root.rglob("metrics.csv")
    found: dict[str, list[float]] = {}
    with file.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            for name, value in row.items():
                if value:
                    found.setdefault(name, []).append(float(value))
    return found


def wandb_rows(root: Path) -> list[dict[str, object]]:
    """What the one offline run below a directory logged, a dictionary a step."""
    histories = (record.history for record in _wandb_records(root) if record.HasField("history"))
    return [_values(history.item) for history in histories]


def wandb_config(root: Path) -> dict[str, object]:
    """Its configuration."""
    found: dict[str, object] = {}
    for record in _wandb_records(root):
        found |= _values([*record.run.config.update, *record.config.update])
    return found


def wandb_table(root: Path, name: str) -> tuple[list[str], list[list[object]]]:
    """Columns and rows of the table that was logged last under a name."""
    path = [row[f"{name}.path"] for row in wandb_rows(root) if f"{name}.path" in row][-1]
    (file,) = root.rglob(f"offline-run-*/files/{path}")
    table = json.loads(file.read_text(encoding="utf-8"))
    return table["columns"], table["data"]


def _values(items: Iterable[Item]) -> dict[str, object]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _wandb_records(root: Path) -> list[Record]:
    (file,) = root.rglob("offline-run-*/run-*.wandb")
    return [Record.FromString(data) for data in _log_records(file.read_bytes())]


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format, which may be cut over blocks of 32 KiB."""
    position, record = _FILE_HEADER_BYTES, b""
    while position + _HEADER.size <= len(data):
        rest = _BLOCK - position % _BLOCK
        if rest < _HEADER.size:
            position += rest
            continue
        _, length, kind = _HEADER.unpack_from(data, position)
        if not (length or kind):
            return
        part = data[position + _HEADER.size :][:length]
        position += _HEADER.size + length
        record = part if kind in (_WHOLE, _FIRST) else record + part
        if kind in (_WHOLE, _LAST):
            yield record
