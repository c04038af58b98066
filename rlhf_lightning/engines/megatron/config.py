"""Options of the Megatron engine, and which layouts a model allows; does not import Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedConfig

from rlhf_lightning.engines.conversion import Conversion
from rlhf_lightning.engines.head import Head
from rlhf_lightning.engines.huggingface.models import read_config
from rlhf_lightning.engines.train_config import TrainConfig, naming_path
from rlhf_lightning.parallel import ParallelLayout, Sharding, even_stages
from rlhf_lightning.parallel.sharding import indivisible
from rlhf_lightning.spec import ModelSpec, why_not_megatron


@dataclass(frozen=True, kw_only=True)
class Megatron(TrainConfig):
    """Options of the Megatron engine."""

    option: ClassVar[str] = "strategy.settings.megatron"
    lends: ClassVar[bool] = True
    takes_sizes: ClassVar[bool] = True

    sequence_parallel: bool = False
    """Divide norms and residuals over the tensor ranks by token; without effect where t = 1."""
    chunks: int = 1
    """Number of runs of layers in a stage; above 1 the pipeline is interleaved, and its bubble smaller."""
    distributed_optimizer: bool = False
    """Shard masters and moments over the replicas. Parameters are in Megatron's own buffer then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunks < 1:
            raise ValueError(
                f"strategy.settings.megatron.chunks={self.chunks}: a stage holds at least 1 run. Try 1."
            )

    def check(self, spec: ModelSpec, head: Head, layout: ParallelLayout) -> None:
        """See `TrainConfig.check`."""
        config = read_config(spec)
        with naming_path(spec):
            check_layout(config, layout, head=head, settings=self)

    def allows(self, layout: ParallelLayout, layers: int) -> bool:
        """See `TrainConfig.allows`: one stage is not interleaved, and no run of layers is empty."""
        return self.chunks == 1 or (layout.p > 1 and layout.p * self.chunks <= layers)

    @property
    def sharding(self) -> Sharding:
        """See `TrainConfig.sharding`."""
        return "states" if self.distributed_optimizer else "none"

    @property
    def held_once(self) -> bool:
        """See `TrainConfig.held_once`; with a distributed optimizer the training shard is in its buffer."""
        return not self.distributed_optimizer


def check_layout(
    config: PreTrainedConfig,
    layout: ParallelLayout,
    *,
    head: Head = "lm",
    settings: Megatron | None = None,
) -> None:
    """Refuse a layout that cannot divide the model.

    Raises:
        ValueError: the model cannot be converted, or p, t or the t of generation does not divide it; the
            message names sizes that do.
    """
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    mlp_bias = getattr(config, "mlp_bias", False)
    if reason := why_not_megatron(config.model_type, mlp_bias=mlp_bias, rope=rope):
        raise ValueError(
            f"{reason}. Take another model, or --strategy.settings.engine fsdp under a strategy that takes "
            "it, such as colocated."
        )
    conversion = Conversion(config, head=head)
    chunks = (settings or Megatron()).chunks
    fitting = [t for t in range(1, conversion.heads + 1) if not _indivisible(conversion, t)]
    if reason := _indivisible(conversion, layout.t):
        near = [max(n for n in fitting if n < layout.t), *[n for n in fitting if n > layout.t][:1]]
        raise ValueError(
            f"layout (train t={layout.t}): {reason}. Try train t={' or '.join(str(n) for n in near)}."
        )
    _check_generating(conversion, layout)
    if layout.p == 1 and chunks > 1:
        raise ValueError(
            f"strategy.settings.megatron.chunks={chunks} with train p=1: one stage has nothing to "
            "interleave. Try chunks=1, or train p=2."
        )
    even_stages(config.num_hidden_layers, layout.p, chunks=chunks)


def _check_generating(conversion: Conversion, layout: ParallelLayout) -> None:
    """Refuse tensor shards in generation that cannot share the key-value heads, though they divide t."""
    t = layout.generating.t
    if reason := _indivisible(conversion, t):
        fitting = [n for n in range(1, layout.t + 1) if not layout.t % n and not _indivisible(conversion, n)]
        raise ValueError(
            f"--strategy.parallel.generate.t {t} (train t={layout.t}): {reason}. Try "
            f"--strategy.parallel.generate.t {' or '.join(str(n) for n in fitting)}."
        )


def _indivisible(conversion: Conversion, t: int) -> str:
    """Why t tensor ranks cannot divide the model; empty if they can."""
    return indivisible(
        t,
        heads=conversion.heads,
        groups=conversion.groups,
        head_size=conversion.head_size,
        inner=conversion.config.intermediate_size,
    )
