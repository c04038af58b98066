"""The Megatron engine: see `engine`, which imports Megatron-core; this module does not."""

import warnings

from rlhf_lightning.engines.megatron.config import Megatron, check_layout

__all__ = ["Megatron", "check_layout", "silence_on_host"]


def silence_on_host() -> None:
    """Leave out, before Megatron is imported, what it misses for GPUs and says of a default of its own."""
    missing = ("Transformer Engine and Apex are not", "Apex is not")
    for said in (*missing, "full scope is deprecated", "When using .* CUDA_DEVICE_MAX_CONNECTIONS"):
        warnings.filterwarnings("ignore", said, UserWarning)
