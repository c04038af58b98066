"""Safetensors files of which the umask says who may read them: safetensors itself keeps its files private."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import torch as safetensors
from torch import Tensor


def save_file(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors on the host; a file that is there is replaced, and who may read it stays.

    Args:
        tensors: by name, contiguous.
        file: to write.
        metadata: texts of its header.
    """
    file.touch()
    mode = file.stat().st_mode
    safetensors.save_file(dict(tensors), file, metadata)
    file.chmod(mode)
