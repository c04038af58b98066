"""The vLLM engine for generation: see `engine`, which imports vLLM; this module does not."""

from rlhf_lightning.engines.vllm.config import VLLM, check_vllm, require_vllm

__all__ = ["VLLM", "check_vllm", "require_vllm"]
