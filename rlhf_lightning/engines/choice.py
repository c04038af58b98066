"""The engines that train a model and generate with it, chosen by the types of their configurations."""

from __future__ import annotations

from importlib import import_module

from rlhf_lightning.engines.deepspeed import ZeRO
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.fsdp.base_model import register_adapted
from rlhf_lightning.engines.fsdp.engine import FSDP, FSDPEngine
from rlhf_lightning.engines.generation import GenerationEngine
from rlhf_lightning.engines.head import Head
from rlhf_lightning.engines.megatron import silence_on_host
from rlhf_lightning.engines.native.engine import NativeEngine
from rlhf_lightning.engines.native.generator import Native
from rlhf_lightning.engines.train_config import TrainConfig
from rlhf_lightning.engines.training import TrainEngine, WeightSource
from rlhf_lightning.engines.vllm import VLLM
from rlhf_lightning.parallel import Seat
from rlhf_lightning.spec import ModelSpec


def train_engine(model: ModelSpec, *, head: Head, seat: Seat, config: TrainConfig) -> TrainEngine:
    """Make the training engine of one rank, and load its part of the model.

    Raises:
        ValueError: the model cannot be loaded, or the layout cannot divide it.
    """
    if isinstance(config, ZeRO) and not model.weights_change and not config.offload_parameters:
        # DeepSpeed would allocate masters and moments even for a frozen model.
        assert seat.groups is not None
        return FSDPEngine(
            model, head=head, group=seat.groups.data, device=seat.device, config=config.for_frozen()
        )
    if isinstance(config, FSDP):
        tensor = seat.groups.tensor if seat.groups is not None else None
        fsdp = FSDPEngine(
            model, head=head, group=seat.dp_group, tensor=tensor, device=seat.device, config=config
        )
        if model.lora is not None and head == "lm":
            register_adapted(model, fsdp, seat=seat)
        return fsdp
    # Megatron-core and DeepSpeed take seconds to import, and only their own engines need them.
    package = "deepspeed" if isinstance(config, ZeRO) else "megatron"
    if package == "megatron" and seat.device.type == "cpu":
        silence_on_host()
    module = import_module(f"rlhf_lightning.engines.{package}.engine")
    engine: type[TrainEngine] = module.ZeROEngine if isinstance(config, ZeRO) else module.MegatronEngine
    return engine(model, head=head, seat=seat, config=config)  # type: ignore[call-arg]


def generation_engine(
    model: ModelSpec, source: WeightSource, *, seat: Seat, ends: Ends, config: Native | VLLM
) -> GenerationEngine:
    """Make the generation engine of one rank; all ranks of a copy call it.

    Args:
        model: the model whose weights the source has.
        source: where the weights come from; for the native engine a training engine.
        seat: this rank's place.
        ends: what ends a response.
        config: options of the engine; their type chooses the engine.

    Raises:
        ValueError: the engine cannot generate with the model.
    """
    if isinstance(config, Native):
        assert isinstance(source, TrainEngine)
        return NativeEngine(source, seat=seat, ends=ends, config=config)
    # vLLM takes ten seconds to import, and only its own engine needs it.
    engine: type[GenerationEngine] = import_module("rlhf_lightning.engines.vllm.engine").VLLMEngine
    return engine(model, source, seat=seat, ends=ends, config=config)  # type: ignore[call-arg]
