"""Lets Megatron compute on a CPU: inside a context, its calls for the current CUDA device give the host.

Functions of torch.cuda are replaced until the context ends, and tensor creation is redirected only in the
thread that entered it. These models use nothing that Megatron compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlhf_lightning.environment import replaced


@contextmanager
def on_the_host() -> Iterator[None]:
    """Let Megatron compute on a CPU."""
    device = {
        "current_device": lambda: "cpu",  # buffers and received tensors are allocated there
        "synchronize": lambda: None,  # called after each exchange between stages
    }
    # Recomputation saves and restores the random state, though these models draw no random numbers.
    generator = {
        "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda *_, **__: None,
    }
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, device))
        stack.enter_context(replaced(random, generator))
        stack.enter_context(_CudaIsHost())
        yield


class _CudaIsHost(TorchFunctionMode):
    """`device="cuda"` makes a tensor on the host; `Tensor.cuda` and `type` answer as on a GPU."""

    def __torch_function__(  # type: ignore[override]  # torch always gives the arguments
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object],
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):  # counters, scales and overflow flags
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:  # a tied embedding, before the stages add it up
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # optimizers sort parameters by it
            return cast(Tensor, args[0]).type().replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)
