"""How one model computes: training engines, generation engines, and what they share."""

from rlhf_lightning.engines.architecture import check_checkpoint
from rlhf_lightning.engines.engine import PARTS, Part, TrainEngine, Transition
from rlhf_lightning.engines.forward import Head
from rlhf_lightning.engines.fsdp import FSDP, FSDPEngine
from rlhf_lightning.engines.megatron import Megatron, check_layout
from rlhf_lightning.engines.models import check_model, read_config
from rlhf_lightning.engines.native import Native, NativeGenerator
from rlhf_lightning.engines.source import located, max_positions
from rlhf_lightning.engines.training import train_engine

__all__ = [
    "FSDP",
    "PARTS",
    "FSDPEngine",
    "Head",
    "Megatron",
    "Native",
    "NativeGenerator",
    "Part",
    "TrainEngine",
    "Transition",
    "check_checkpoint",
    "check_layout",
    "check_model",
    "located",
    "max_positions",
    "read_config",
    "train_engine",
]
