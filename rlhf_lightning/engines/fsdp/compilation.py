"""Decoder layers that PyTorch compiles: norms, rotations and activations in a few passes over memory each.

Attention over packed rows stays as it is, a call of its own, and so do layers that generate.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

_COMPILERS = ("g++", "clang++", "c++")


def check_compiler(option: str) -> None:
    """Refuse to compile where nothing can: PyTorch's own code is C++, on a GPU what starts its kernels.

    Args:
        option: what was typed, for the message.

    Raises:
        ValueError: no C++ compiler is on the PATH.
    """
    named = os.environ.get("CXX")
    if not any(map(shutil.which, [named] if named else _COMPILERS)):
        raise ValueError(
            f"{option}=true: found no C++ compiler ({named or ', '.join(_COMPILERS)}) on the PATH. "
            "Install one, such as g++, or leave the option out."
        )


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the layers of one model; those of one kind share their code, for any number of tokens."""
    compiled: dict[type[nn.Module], Any] = {}
    make = cast(Any, torch.compile)  # its types know fewer options
    for layer in layers:
        kind = type(layer)
        if kind not in compiled:
            # Isolated: together, the models of a process would have no more than eight versions.
            compiled[kind] = make(kind.forward, dynamic=True, isolate_recompiles=True)
        cast(Any, layer).forward = partial(compiled[kind], layer)


def uncompiled() -> AbstractContextManager[None]:
    """Compute with the layers as they were, for a while, as they decode."""
    return cast(AbstractContextManager[None], torch.compiler.set_stance("force_eager"))
