"""The Megatron engine: see `engine`, which imports Megatron-core; this module does not."""

from rlhf_lightning.engines.megatron.config import Megatron, check_layout

__all__ = ["Megatron", "check_layout"]
