"""Libraries that belong to an optional extra, imported where they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def import_extra(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import a module of an optional extra.

    Args:
        module: its dotted name, such as `pyarrow.parquet`.
        extra: the extra of this package that brings it.
        purpose: what it is needed for, as the subject of the error's sentence.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as err:
        raise ValueError(
            f"{purpose} needs the module {err.name!r}, which is not installed. "
            f"Try: pip install 'rlhf-lightning[{extra}]'"
        ) from err
