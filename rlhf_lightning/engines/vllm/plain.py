"""Keeps vLLM on a CPU from repacking the weights of a model, so that they can be updated and shared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import vllm._custom_ops as operations
from vllm.model_executor.layers import utils


@contextmanager
def plain_weights() -> Iterator[None]:
    """Within this context, loading a model packs no matrices for oneDNN or for vLLM's own kernels."""
    packs = {operations: "_supports_onednn", utils: "check_cpu_sgl_kernel"}
    before = {module: vars(module)[name] for module, name in packs.items()}
    operations._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    try:
        yield
    finally:
        for module, name in packs.items():
            setattr(module, name, before[module])
