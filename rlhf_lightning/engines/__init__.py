"""How one model computes: training engines, generation engines, and what they share."""

from rlhf_lightning.engines.checkpoint import require_shared
from rlhf_lightning.engines.choice import generation_engine, train_engine
from rlhf_lightning.engines.deepspeed import ZeRO
from rlhf_lightning.engines.determinism import Deterministic, be_deterministic, deterministic_here
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.fsdp.base_model import shared_base_model
from rlhf_lightning.engines.fsdp.engine import FSDP, FSDPEngine
from rlhf_lightning.engines.generation import GenerationEngine
from rlhf_lightning.engines.head import Asked, Head
from rlhf_lightning.engines.huggingface.adapters import saved_lora
from rlhf_lightning.engines.huggingface.architecture import (
    check_adapters,
    check_checkpoint,
    check_head,
    check_language,
    check_packed,
)
from rlhf_lightning.engines.huggingface.export import export_checkpoint
from rlhf_lightning.engines.huggingface.models import read_config
from rlhf_lightning.engines.huggingface.sizes import (
    explaining_positions,
    max_positions,
    num_tokens,
    padding_token,
)
from rlhf_lightning.engines.huggingface.source import (
    ADAPTER_CONFIG,
    TOKENIZER_FILES,
    check_model,
    has_tokenizer,
    is_fresh,
    located,
    on_hub,
    resolve,
)
from rlhf_lightning.engines.megatron import Megatron
from rlhf_lightning.engines.native.config import Native
from rlhf_lightning.engines.native.generator import NativeGenerator
from rlhf_lightning.engines.offload import PARTS
from rlhf_lightning.engines.tensor_files import save_file
from rlhf_lightning.engines.train_config import TrainConfig
from rlhf_lightning.engines.training import TrainEngine, Transition, WeightSource
from rlhf_lightning.engines.vllm import VLLM, check_vllm, require_vllm

__all__ = [
    "ADAPTER_CONFIG",
    "FSDP",
    "PARTS",
    "TOKENIZER_FILES",
    "VLLM",
    "Asked",
    "Deterministic",
    "Ends",
    "FSDPEngine",
    "GenerationEngine",
    "Head",
    "Megatron",
    "Native",
    "NativeGenerator",
    "TrainConfig",
    "TrainEngine",
    "Transition",
    "WeightSource",
    "ZeRO",
    "be_deterministic",
    "check_adapters",
    "check_checkpoint",
    "check_head",
    "check_language",
    "check_model",
    "check_packed",
    "check_vllm",
    "deterministic_here",
    "explaining_positions",
    "export_checkpoint",
    "generation_engine",
    "has_tokenizer",
    "is_fresh",
    "located",
    "max_positions",
    "num_tokens",
    "on_hub",
    "padding_token",
    "read_config",
    "require_shared",
    "require_vllm",
    "resolve",
    "save_file",
    "saved_lora",
    "shared_base_model",
    "train_engine",
]
