"""The engines that train a model and generate with it, chosen by the types of their configurations.

Megatron-core, DeepSpeed and vLLM take seconds to import: only who computes with an engine imports its own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module

from rlhf_lightning.engines.deepspeed import ZeRO
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.fsdp.base_model import register_adapted
from rlhf_lightning.engines.fsdp.engine import FSDP, FSDPEngine
from rlhf_lightning.engines.generation import GenerationEngine
from rlhf_lightning.engines.head import Head
from rlhf_lightning.engines.megatron import Megatron, silence
from rlhf_lightning.engines.native.config import Native
from rlhf_lightning.engines.native.engine import NativeEngine
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
    if isinstance(config, FSDP):
        tensor = seat.groups.tensor if seat.groups is not None else None
        fsdp = FSDPEngine(
            model, head=head, group=seat.dp_group, tensor=tensor, device=seat.device, config=config
        )
        if model.lora is not None and head == "lm":
            register_adapted(model, fsdp, seat=seat)
        return fsdp
    if isinstance(config, ZeRO) and not model.weights_change and not config.offload_parameters:
        # DeepSpeed would allocate masters and moments even for a frozen model.
        assert seat.groups is not None
        return FSDPEngine(
            model, head=head, group=seat.groups.data, device=seat.device, config=config.for_frozen()
        )
    if isinstance(config, ZeRO):
        if not model.weights_change:  # its masters, which nothing reads, would stay on the device
            config = replace(config, offload_optimizer=True)
        from rlhf_lightning.engines.deepspeed.engine import ZeROEngine  # noqa: PLC0415

        return ZeROEngine(model, head=head, seat=seat, config=config)
    assert isinstance(config, Megatron)
    silence(on_host=seat.device.type == "cpu")
    from rlhf_lightning.engines.megatron.engine import MegatronEngine  # noqa: PLC0415

    return MegatronEngine(model, head=head, seat=seat, config=config)


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
    # vLLM keeps the traceback of a package it does not find, and with it the frames of who imports it first:
    # a thread has none that hold an engine.
    with ThreadPoolExecutor(1) as thread:
        vllm = thread.submit(import_module, "rlhf_lightning.engines.vllm.engine").result()
    engine: GenerationEngine = vllm.VLLMEngine(model, source, seat=seat, ends=ends, config=config)
    return engine
