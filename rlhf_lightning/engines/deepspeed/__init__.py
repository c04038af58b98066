"""The DeepSpeed engine: see `engine`, which imports DeepSpeed; what stands here does not."""

from rlhf_lightning.engines.deepspeed.config import ZeRO

__all__ = ["ZeRO"]
