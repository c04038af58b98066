"""Reads `--hardware`: a cluster of one kind of devices or of several, and how many there are of each.

--hardware a100-80gb --devices 16          one kind
--hardware a100-80gb:16,own.yaml:8         several, with how many there are of each
"""

from __future__ import annotations

from rlhf_lightning.mapping import hardware
from rlhf_lightning.mapping.hardware import Hardware

_EXAMPLE = "--hardware a100-80gb:16,h100-80gb:8"


def load(source: str, devices: int | None) -> tuple[tuple[Hardware, int], ...]:
    """The kinds of devices, and how many there are of each.

    Args:
        source: as the head of the module shows.
        devices: of the whole cluster; None where the source says it.

    Raises:
        ValueError: a hardware is unknown, a number is missing, or the two disagree.
    """
    parts = [part.rpartition(":") for part in source.split(",")]
    if len(parts) == 1 and not parts[0][1]:
        if devices is None:
            raise ValueError(f"--hardware {source}: how many are there? Add --devices 16, or {_EXAMPLE}.")
        return ((hardware.load(source), devices),)
    listed = [(name.strip(), _number(source, number.strip() if name else "")) for name, _, number in parts]
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


def _number(source: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"--hardware {source}: each kind needs a number of devices from 1 up, as in {_EXAMPLE}."
        )
    return int(text)
