"""Safetensors files: whether one is complete, by its header, and who may read it, by the umask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor


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


def save_file(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors on the host; a file that is there is replaced, and who may read it stays.

    safetensors itself keeps its files private.

    Args:
        tensors: by name, contiguous.
        file: to write.
        metadata: texts of its header.
    """
    file.touch()
    mode = file.stat().st_mode
    safetensors.save_file(dict(tensors), file, metadata)
    file.chmod(mode)
