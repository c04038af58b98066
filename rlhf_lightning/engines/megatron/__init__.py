"""The Megatron engine: see `engine`, which imports Megatron-core; this module does not."""

import warnings

from rlhf_lightning.engines.megatron.config import Megatron, check_layout

__all__ = ["Megatron", "check_layout", "silence"]


def silence(*, on_host: bool) -> None:
    """Leave out, before Megatron is imported, what PyTorch says of its calls.

    Args:
        on_host: also what Megatron misses for GPUs, and says of a default of its own.
    """
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not on_host:
        return
    missing = ("Transformer Engine and Apex are not", "Apex is not")
    for said in (*missing, "full scope is deprecated", "When using .* CUDA_DEVICE_MAX_CONNECTIONS"):
        warnings.filterwarnings("ignore", said, UserWarning)
