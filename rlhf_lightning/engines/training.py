"""The training engine of a model, chosen by the type of its configuration."""

from __future__ import annotations

from importlib import import_module

from rlhf_lightning.engines.deepspeed import ZeRO
from rlhf_lightning.engines.engine import TrainEngine
from rlhf_lightning.engines.fsdp import FSDP, FSDPEngine
from rlhf_lightning.engines.head import Head
from rlhf_lightning.engines.train_config import TrainConfig
from rlhf_lightning.engines.unadapted import note_adapted
from rlhf_lightning.parallel import Seat
from rlhf_lightning.spec import ModelSpec


def train_engine(model: ModelSpec, *, head: Head, seat: Seat, config: TrainConfig) -> TrainEngine:
    """Load a model's part for one rank.

    Raises:
        ValueError: the model cannot be loaded, or not be divided so.
    """
    if isinstance(config, ZeRO) and not model.kept and not config.offload_parameters:
        # DeepSpeed would give it masters and moments.
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
            note_adapted(model, fsdp, seat=seat)
        return fsdp
    # Megatron-core and DeepSpeed take seconds to import, and only their own engines need them.
    package = "deepspeed" if isinstance(config, ZeRO) else "megatron"
    module = import_module(f"rlhf_lightning.engines.{package}.engine")
    engine: type[TrainEngine] = module.ZeROEngine if isinstance(config, ZeRO) else module.MegatronEngine
    return engine(model, head=head, seat=seat, config=config)  # type: ignore[call-arg]
