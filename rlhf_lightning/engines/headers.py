"""The header of a safetensors file: which tensors it holds, and whether the file is complete."""

from __future__ import annotations

import json
import struct
from pathlib import Path

_LENGTH_BYTES = 8
_OF_THE_FILE = "__metadata__"


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, by name; reads the header only.

    Raises:
        ValueError: the file is truncated or corrupt.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(_LENGTH_BYTES)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == _LENGTH_BYTES else size
        if length > size - _LENGTH_BYTES:
            raise ValueError(
                f"{file}: is truncated, its {size} bytes end inside the header. Copy the file again."
            )
        header = stream.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != _OF_THE_FILE}
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in entries.items()}
    except (UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as err:
        raise ValueError(
            f"{file}: is corrupt, its header is not readable ({err}). Copy the file again."
        ) from err
    expected = _LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        raise ValueError(f"{file}: is truncated or corrupt, {size} bytes for {expected}. Copy it again.")
    return shapes
