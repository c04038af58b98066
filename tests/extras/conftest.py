"""What vLLM does to a process as each engine starts and ends, where it costs more than the engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from importlib import import_module

import pytest


@pytest.fixture(scope="session", autouse=True)
def engines_start_fast(session_leaves_nothing: None) -> Iterator[None]:
    """Leave modules out of garbage collections, replace Triton's kernels once, inspect models in here.

    An engine freezes all that is there and in its end, as the product does, lets go of all: from then on each
    of its five collections looked at every module. test_fresh_process.py has a process where nothing is kept.
    Where vLLM has not met an architecture before, it imports itself in a process, lest CUDA be initialised.
    """
    import_module("rlhf_lightning.engines.vllm.engine")  # imports vLLM, and nothing else is changed
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine import core

    replace = cache(CpuPlatform.register_triton_kernel_overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        patch.setattr(core, "freeze_gc_heap", lambda: None)
        patch.setattr(CpuPlatform, "register_triton_kernel_overrides", staticmethod(replace))
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        yield
