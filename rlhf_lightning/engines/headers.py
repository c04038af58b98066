"""The header of a safetensors file: which tensors it holds, and whether the file is complete."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, by name; reads the header only.

    Raises:
        ValueError: the file is truncated or corrupt.
    """
    try:
        with safe_open(file, "np") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.offset_keys()}
    except SafetensorError as err:
        raise ValueError(f"{file}: is truncated or corrupt ({err}). Copy the file again.") from err
