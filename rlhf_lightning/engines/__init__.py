"""How one model computes: training engines, generation engines, and what they share."""

from rlhf_lightning.engines.architecture import check_checkpoint
from rlhf_lightning.engines.deepspeed import ZeRO, check_zero
from rlhf_lightning.engines.engine import PARTS, Part, TrainEngine, Transition, WeightSource
from rlhf_lightning.engines.forward import Head
from rlhf_lightning.engines.fsdp import FSDP, FSDPEngine
from rlhf_lightning.engines.generation import Ends, GenerationEngine, generation_engine
from rlhf_lightning.engines.megatron import Megatron, check_layout
from rlhf_lightning.engines.models import check_model, read_config
from rlhf_lightning.engines.native import Native, NativeGenerator
from rlhf_lightning.engines.source import located, max_positions
from rlhf_lightning.engines.training import train_engine
from rlhf_lightning.engines.vllm import VLLM, check_vllm, require_vllm

__all__ = [
    "FSDP",
    "PARTS",
    "VLLM",
    "Ends",
    "FSDPEngine",
    "GenerationEngine",
    "Head",
    "Megatron",
    "Native",
    "NativeGenerator",
    "Part",
    "TrainEngine",
    "Transition",
    "WeightSource",
    "ZeRO",
    "check_checkpoint",
    "check_layout",
    "check_model",
    "check_vllm",
    "check_zero",
    "generation_engine",
    "located",
    "max_positions",
    "read_config",
    "require_vllm",
    "train_engine",
]
