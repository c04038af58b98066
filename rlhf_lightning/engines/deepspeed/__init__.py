"""The DeepSpeed engine: see `engine`, which imports DeepSpeed; what stands here does not."""

from rlhf_lightning.engines.deepspeed.config import ZeRO, check_zero

__all__ = ["ZeRO", "check_zero"]
