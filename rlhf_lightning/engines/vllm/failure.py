"""What vLLM raises, with what it was at and what to change; asked without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_lightning.engines.vllm.config import VLLM

_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_CACHE = ("kv cache", "cache blocks", "auto-fit max_model_len")


class VLLMError(RuntimeError):
    """vLLM failed; the message says at what, why, and what to change."""


@contextmanager
def failing(at: str, config: VLLM) -> Iterator[None]:
    """Let what vLLM raises within say that it was vLLM.

    Args:
        at: what it does there, as in `as it answered 8 rows`.
        config: of the engine.

    Raises:
        VLLMError: as said.
    """
    try:
        yield
    except Exception as err:
        said = str(err).strip().removesuffix(".")
        raise VLLMError(f"vLLM failed {at}: {type(err).__name__}: {said}. {_advice(err, config)}") from err


def _advice(err: Exception, config: VLLM) -> str:
    """What to change."""
    said = str(err).lower()
    if any(words in said for words in _CACHE):
        return (
            f"Try more than strategy.settings.vllm.kv_cache_gib={config.kv_cache_gib} (0: on a CPU 1), or "
            f"less than max_model_len={config.max_model_len} (0: what the cache can hold)."
        )
    if isinstance(err, MemoryError) or any(words in said for words in _MEMORY):
        return (
            f"Try less than strategy.settings.vllm.kv_cache_gib={config.kv_cache_gib} (0: the default), "
            f"gpu_memory_utilization={config.gpu_memory_utilization} or max_num_seqs={config.max_num_seqs}."
        )
    return (
        "VLLM_LOGGING_LEVEL=INFO in the environment shows what it did before; "
        "strategy.settings.generator=native answers without it."
    )
