"""What vLLM does to its process, undone: other engines live there too."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""It computes in this process, with the runner whose random numbers are each request's own (the other one is
its choice on GPUs)."""
_NEVER = "VLLM_CPU_KVCACHE_SPACE"
"""Would count more than the option for the same."""
_BINDING = "init_cpu_memory_env"
"""Operation that keeps the memory of the process on one socket."""
_DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Unless the user says otherwise it tells nobody how it is used, and here only what went wrong."""


@contextmanager
def guest() -> Iterator[None]:
    """Import and build vLLM within; afterwards the process is as it was.

    That is the environment, to which it writes; `torch.set_num_threads`, which on a CPU it replaces by a
    function that does nothing; the generators of random numbers, which it seeds; and the garbage collector,
    which it keeps from everything that is there. On a CPU it would also move the memory of the process to one
    socket and keep it there, which could not be undone, and so is not done.
    """
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    threads = torch.get_num_threads()
    draws, numbers = random.getstate(), np.random.get_state()
    os.environ.update(_DEFAULTS | environment | _ALWAYS)
    os.environ.pop(_NEVER, None)
    operations = vars(torch.ops._C)
    binding = operations.get(_BINDING)
    operations[_BINDING] = _nothing
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        operations.pop(_BINDING)
        operations |= {} if binding is None else {_BINDING: binding}
        gc.unfreeze()
        np.random.set_state(numbers)
        random.setstate(draws)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def _nothing(*_: object) -> None:
    pass
