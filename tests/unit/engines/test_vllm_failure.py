"""What vLLM's exceptions say beside themselves: which options to change."""

from __future__ import annotations

import re

import pytest

from rlhf_lightning.engines import VLLM
from rlhf_lightning.engines.exchange import UnfitError
from rlhf_lightning.engines.vllm.failure import VLLMError, failing

LESS = "Try less than strategy.settings.vllm.kv_cache_gib=0.0 (0: the default), gpu_memory_utilization=0.4 or"
MORE = (
    "Try on a GPU more than strategy.settings.vllm.gpu_memory_utilization=0.4, on a CPU more than "
    "kv_cache_gib=1, or less than max_model_len=0"
)
OTHER = "VLLM_LOGGING_LEVEL=INFO in the environment"


@pytest.mark.parametrize(
    ("theirs", "advice"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", LESS),
        (
            "Free memory on device cuda:0 (20/80 GiB) on startup is less than desired GPU memory utilization"
            " (0.4, 32.0 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
            LESS,
        ),
        (
            "Available memory on node 0 (3.1/62.7 GiB) on kv cache allocation is less than requested memory"
            " for kv (8.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU"
            " memory used by other processes.",
            LESS,
        ),
        ("No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when", MORE),
        (
            "To serve at least one request with the model's max seq len (512), (0.01 GiB KV cache is needed,"
            " which is larger than the available KV cache memory (0.0 GiB).",
            MORE,
        ),
        ("Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token", MORE),
        ("another", OTHER),
    ],
)
def test_a_lack_of_memory_is_answered_with_the_options_that_take_it(theirs: str, advice: str) -> None:
    with pytest.raises(VLLMError) as told, failing("to start", VLLM()):
        raise ValueError(theirs)
    said = theirs.removesuffix(".")
    assert str(told.value).startswith(f"vLLM failed to start: ValueError: {said}. {advice}")


def test_a_host_without_memory_may_give_no_reason() -> None:
    with pytest.raises(VLLMError, match=rf"MemoryError.* {re.escape(LESS)}"), failing("to start", VLLM()):
        raise MemoryError


def test_weights_of_another_model_are_told_as_they_are() -> None:
    with pytest.raises(UnfitError, match=r"^m: was given no a\.$"), failing("to start", VLLM()):
        raise UnfitError("m: was given no a.")


def test_a_cache_of_a_given_size_is_not_said_to_grow_with_the_share_of_the_gpu() -> None:
    said = r"Try more than strategy\.settings\.vllm\.kv_cache_gib=2\.0, or less"
    with pytest.raises(VLLMError, match=said), failing("to start", VLLM(kv_cache_gib=2.0)):
        raise ValueError("No available memory for the cache blocks.")
