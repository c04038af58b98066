"""Compiles decoder layers with torch.compile for training and scoring, with `compile_layers=true`.

Norms, rotary embeddings and activations become few kernels. Attention over packed rows is not compiled, and
neither are layers that generate.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

_COMPILER = "clang++" if sys.platform == "darwin" else "g++"
"""What torch.compile calls where CXX names no other; it looks for none besides."""


def check_compiler() -> None:
    """Refuse to compile without a C++ compiler, which torch.compile needs on GPUs too, to launch kernels.

    It is looked for on this machine, the controller's; those of the devices are taken to be like it.

    Raises:
        ValueError: the C++ compiler is not on the PATH.
    """
    compiler = os.environ.get("CXX", _COMPILER)
    if not shutil.which(compiler):
        raise ValueError(
            f"strategy.settings.train.compile_layers=true: found no C++ compiler ({compiler}) on the PATH of "
            f"this machine, and every machine with devices needs one. Install {_COMPILER}, name another as "
            "CXX in the environment, or leave the option out."
        )


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the layers of one model; layers of one class share code, which takes any number of tokens."""
    compiled: dict[type[nn.Module], Any] = {}
    make = cast(Any, torch.compile)  # its type annotations lack an option
    for layer in layers:
        kind = type(layer)
        if kind not in compiled:
            # Isolated: otherwise all models of the process share torch's limit of eight recompilations.
            compiled[kind] = make(kind.forward, dynamic=True, isolate_recompiles=True)
        cast(Any, layer).forward = partial(compiled[kind], layer)


def uncompiled() -> AbstractContextManager[None]:
    """Within this context the original layers compute, as in generation."""
    return cast(AbstractContextManager[None], torch.compiler.set_stance("force_eager"))
