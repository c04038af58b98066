"""The DeepSpeed engine (ZeRO): see `engine`, which imports DeepSpeed; this module does not."""

from rlhf_lightning.engines.deepspeed.config import ZeRO

__all__ = ["ZeRO"]
