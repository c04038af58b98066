"""Undoes what importing and starting vLLM changes in the process, which other engines share."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from rlhf_lightning.environment import environment

_ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""Set for vLLM: compute in this process, with the model runner that has a random generator per request. (On
GPUs the other runner is vLLM's default.)"""
_NEVER = "VLLM_CPU_KVCACHE_SPACE"
"""Unset for vLLM: it would override the option `kv_cache_gib`."""
_BINDING = "init_cpu_memory_env"
"""vLLM's operation that binds the memory of the process to one socket."""
_DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Set unless the user sets them: send no usage statistics, log errors only."""


@contextmanager
def process_restored() -> Iterator[None]:
    """Import, start or end vLLM within this context; on exit the process is restored.

    vLLM writes to the environment; replaces `torch.set_num_threads` on a CPU by a function that does nothing;
    seeds the random generators; freezes all existing objects in the garbage collector; and makes a stream of
    its own the GPU's current one, between which and torch's no freed memory goes.

    Two things are prevented instead. On a CPU it would bind the memory of the process to one socket, which
    cannot be undone. And it would set the precision of float32 products, whose value torch does not always
    tell: `torch.get_float32_matmul_precision` fails where it was set by `torch.backends`.
    """
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    set_precision = torch.set_float32_matmul_precision
    draws, numbers = random.getstate(), np.random.get_state()
    seeded = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    operations = vars(torch.ops._C)
    binding = operations.get(_BINDING)
    operations[_BINDING] = lambda *_: None
    torch.set_float32_matmul_precision = lambda precision: None
    try:
        with (
            environment(_DEFAULTS | os.environ | _ALWAYS),
            torch.random.fork_rng(seeded),
            _stream_restored() if seeded else nullcontext(),
        ):
            os.environ.pop(_NEVER, None)
            yield
    finally:
        operations.pop(_BINDING)
        operations |= {} if binding is None else {_BINDING: binding}
        gc.unfreeze()
        np.random.set_state(numbers)
        random.setstate(draws)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision = set_precision


@contextmanager
def _stream_restored() -> Iterator[None]:
    """On exit the GPU's current stream is that of before, and has waited for the one that took its place.

    It is set where it stayed, too: vLLM notes what is set, and makes a stream where nothing was.
    """
    before = torch.cuda.current_stream()
    try:
        yield
    finally:
        before.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(before)
