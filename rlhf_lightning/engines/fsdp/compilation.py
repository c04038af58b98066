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

_CXX = ("clang++" if sys.platform == "darwin" else "g++",)
"""What torch.compile calls for the kernels of a CPU where CXX names no other; it looks for none besides."""
_CC = ("gcc", "clang")
"""What Triton calls for the programs that launch its kernels on a GPU, where CC names no other."""


def check_compiler(*, gpu: bool) -> None:
    """Refuse to compile without the compiler that torch.compile calls: of C on GPUs, else of C++.

    It is looked for on this machine, the controller's; those of the devices are taken to have the same.
    """
    language, variable, known = ("C", "CC", _CC) if gpu else ("C++", "CXX", _CXX)
    called = (os.environ[variable],) if variable in os.environ else known
    if not any(shutil.which(name) for name in called):
        raise ValueError(
            f"strategy.settings.train.compile_layers=true: found no {language} compiler "
            f"({' or '.join(called)}) on the PATH of this machine, and every machine with devices needs one. "
            f"Install {known[0]}, name another as {variable} in the environment, or leave the option out."
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
