"""How one model computes: training engines, generation engines, and what they share."""

from rlhf_lightning.engines.architecture import check_checkpoint
from rlhf_lightning.engines.engine import PARTS, Part, TrainEngine
from rlhf_lightning.engines.forward import Head
from rlhf_lightning.engines.fsdp import FSDP, FSDPEngine
from rlhf_lightning.engines.models import check_model
from rlhf_lightning.engines.native import Native, NativeGenerator
from rlhf_lightning.engines.source import located, max_positions

__all__ = [
    "FSDP",
    "PARTS",
    "FSDPEngine",
    "Head",
    "Native",
    "NativeGenerator",
    "Part",
    "TrainEngine",
    "check_checkpoint",
    "check_model",
    "located",
    "max_positions",
]
