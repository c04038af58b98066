"""Reads `--hardware`: a cluster of one kind of devices or of several, and how many there are of each.

--hardware a100-80gb --devices 16          one kind
--hardware a100-80gb:16,h100-80gb:8        several, with how many there are of each
--hardware cluster.yaml                    the same as a list of {hardware: name or file, devices: number};
                                           files lie beside the list, or where the command is typed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_lightning.mapping import hardware
from rlhf_lightning.mapping.hardware import Hardware
from rlhf_lightning.yaml_files import read_yaml

_EXAMPLE = "--hardware a100-80gb:16,h100-80gb:8"


def load(source: str, devices: int | None) -> tuple[tuple[Hardware, int], ...]:
    """The kinds of devices, and how many there are of each.

    Args:
        source: as the head of the module shows.
        devices: of the whole cluster; None where the source says it.

    Raises:
        ValueError: a hardware is unknown, a number is missing, or the two disagree.
    """
    listed = _listed(source)
    if listed is None:
        if devices is None:
            raise ValueError(f"--hardware {source}: how many are there? Add --devices 16, or {_EXAMPLE}.")
        return ((hardware.load(source), devices),)
    names = [name for name, _ in listed]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"--hardware {source}: {', '.join(twice)} is named twice. Name it once, with the sum."
        )
    total = sum(number for _, number in listed)
    if devices is not None and devices != total:
        raise ValueError(
            f"--devices {devices} with --hardware {source}: these are {total}. Leave --devices out."
        )
    return tuple((hardware.load(name), number) for name, number in listed)


def _listed(source: str) -> list[tuple[str, int]] | None:
    """Names and numbers; None where the source is one hardware."""
    path = Path(source)
    if path.is_file():
        values = read_yaml(source, shown=source)
        return _entries(source, values) if isinstance(values, list) else None
    parts = [part.rpartition(":") for part in source.split(",")]
    if len(parts) == 1 and not parts[0][1]:
        return None
    return [(name.strip(), _number(source, number.strip() if name else "")) for name, _, number in parts]


def _entries(source: str, values: Sequence[object]) -> list[tuple[str, int]]:
    found = []
    for value in values:
        if not isinstance(value, Mapping) or set(value) != {"hardware", "devices"}:
            raise ValueError(f"{source}: {value} is not {{hardware: a100-80gb, devices: 16}}.")
        beside = Path(source).parent / str(value["hardware"])
        name = str(beside) if beside.is_file() else str(value["hardware"])
        found.append((name, _number(source, str(value["devices"]))))
    if not found:
        raise ValueError(f"{source}: is an empty list. Write - {{hardware: a100-80gb, devices: 16}}.")
    return found


def _number(source: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"--hardware {source}: each kind needs a number of devices from 1 up, as in {_EXAMPLE}."
        )
    return int(text)
