"""Weights that stay as they are on a CPU, as on a GPU, so that they can be written to and shared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import vllm._custom_ops as operations
from vllm.model_executor.layers import utils


@contextmanager
def plain_weights() -> Iterator[None]:
    """Load a model within; vLLM would pack its matrices for oneDNN, or for kernels of its own."""
    packs = {operations: "_supports_onednn", utils: "check_cpu_sgl_kernel"}
    before = {module: vars(module)[name] for module, name in packs.items()}
    operations._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    try:
        yield
    finally:
        for module, name in packs.items():
            setattr(module, name, before[module])
