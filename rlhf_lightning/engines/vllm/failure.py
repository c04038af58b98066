"""Wraps vLLM's exceptions: what it was doing, why it failed, what to change; does not import vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_lightning.engines.exchange import UnfitError
from rlhf_lightning.engines.vllm.config import VLLM

_MEMORY = (
    *("out of memory", "can't allocate memory", "not enough memory"),
    *("desired gpu memory", "less than requested memory"),
)
_CACHE = ("kv cache", "cache blocks", "auto-fit max_model_len")


class VLLMError(RuntimeError):
    """vLLM failed; the message says when, why, and what to change."""


@contextmanager
def failing(at: str, config: VLLM) -> Iterator[None]:
    """Turn exceptions within this context into `VLLMError`, but for weights of another model.

    Args:
        at: when it fails, for the message, such as `as it answered 8 rows`.
        config: of the engine.

    Raises:
        UnfitError: weights do not fit, which no option of vLLM changes.
        VLLMError: instead of any other exception.
    """
    try:
        yield
    except UnfitError:
        raise
    except Exception as err:
        reason = str(err).strip().removesuffix(".")
        raise VLLMError(f"vLLM failed {at}: {type(err).__name__}: {reason}. {_advice(err, config)}") from err


def larger_cache(config: VLLM) -> str:
    """Which options give keys and values more memory."""
    if config.kv_cache_gib:  # a GPU's share is not looked at beside it
        return f"more than strategy.settings.vllm.kv_cache_gib={config.kv_cache_gib}"
    return (
        f"on a GPU more than strategy.settings.vllm.gpu_memory_utilization={config.gpu_memory_utilization}, "
        "on a CPU more than kv_cache_gib=1"
    )


def _advice(err: Exception, config: VLLM) -> str:
    """Which options to change."""
    reason = str(err).lower()
    if isinstance(err, MemoryError) or any(words in reason for words in _MEMORY):
        return (
            f"Try less than strategy.settings.vllm.kv_cache_gib={config.kv_cache_gib} (0: the default), "
            f"gpu_memory_utilization={config.gpu_memory_utilization} or max_num_seqs={config.max_num_seqs}."
        )
    if any(words in reason for words in _CACHE):
        shorter = f"max_model_len={config.max_model_len} (0: what the cache can hold)"
        return f"Try {larger_cache(config)}, or less than {shorter}."
    return (
        "VLLM_LOGGING_LEVEL=INFO in the environment shows what it did before; "
        "strategy.settings.generator=native answers without it."
    )
