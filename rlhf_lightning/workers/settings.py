"""Settings: which engines compute a job's models, and with what options."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal, cast

from rlhf_lightning.engines import (
    FSDP,
    VLLM,
    Deterministic,
    Megatron,
    Native,
    TrainConfig,
    ZeRO,
    deterministic_here,
    require_vllm,
)

_TRAINING = {"fsdp": "train", "megatron": "megatron", "zero": "zero"}
_GENERATING = {"native": "generate", "vllm": "vllm"}
"""For each engine by its name, the field of `Settings` that holds its options."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the models of a job compute; the strategy owns it, every role is built with it.

    Raises:
        ValueError: an engine or a generator of another name.
    """

    engine: Literal["fsdp", "megatron", "zero"] | None = None
    """What trains the models; by default what the strategy trains with, or fsdp where it leaves a choice."""
    train: FSDP = field(default_factory=FSDP)
    """The FSDP engine."""
    megatron: Megatron = field(default_factory=Megatron)
    """The Megatron engine."""
    zero: ZeRO = field(default_factory=ZeRO)
    """The DeepSpeed engine."""
    generator: Literal["native", "vllm"] = "native"
    """What generates with the actor's weights."""
    generate: Native = field(default_factory=Native)
    """The native generation engine."""
    vllm: VLLM = field(default_factory=VLLM)
    """The vLLM engine."""
    advantages: Literal["controller", "workers"] = "controller"
    """Where advantages are computed: the controller fetches what they need, or each worker has its rows."""
    deterministic: Deterministic = False
    """Let runs repeat bit by bit; `--trainer.deterministic true` says so too."""

    def __post_init__(self) -> None:
        for option, kinds in (("engine", (*_TRAINING, None)), ("generator", (*_GENERATING,))):
            if (kind := getattr(self, option)) not in kinds:
                known = ", ".join(filter(None, kinds))
                raise ValueError(f"strategy.settings.{option}={kind}: there is no such engine. Try {known}.")
        self.training.require()
        if self.generator == "vllm":
            require_vllm()

    @property
    def training(self) -> TrainConfig:
        """The configuration of the engine that trains the models."""
        return cast(TrainConfig, getattr(self, _TRAINING[self.engine or "fsdp"]))

    def check_read(self, *, apart: bool) -> None:
        """Refuse options of engines that are not in use, which nothing would read.

        Args:
            apart: whether a separate copy of the actor generates; it computes as the FSDP options say.
        """
        sides = (("engine", self.engine or "fsdp", _TRAINING), ("generator", self.generator, _GENERATING))
        for side, chosen, names in sides:
            read = {names[chosen], "train"} if apart else {names[chosen]}
            for kind, name in names.items():
                if name in read or not (changed := self._changed(name)):
                    continue
                where = " under a strategy that takes it" if side == "engine" else ""
                instead = f"Leave it out, or add --strategy.settings.{side} {kind}{where}"
                if changed[0] in {option.name for option in fields(getattr(self, names[chosen]))}:
                    instead = f"Type --strategy.settings.{names[chosen]}.{changed[0]}"
                raise ValueError(
                    f"strategy.settings.{name}.{changed[0]}={changed[1]}: nothing reads it, since {chosen} "
                    f"computes here and not {kind}. {instead}."
                )

    def _changed(self, name: str) -> tuple[str, object] | None:
        """The first option of an engine that differs from its default, and its value."""
        config = getattr(self, name)
        plain, values = type(config)(), ((one.name, getattr(config, one.name)) for one in fields(config))
        return next(((option, value) for option, value in values if value != getattr(plain, option)), None)

    def completed(self) -> Settings:
        """The same settings with the trainer's `deterministic`, which devices cannot see."""
        return replace(self, deterministic=self.deterministic or deterministic_here())
