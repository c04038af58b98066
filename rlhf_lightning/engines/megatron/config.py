"""How a Megatron engine divides and computes a model, and what it can divide: asked without Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from rlhf_lightning.engines.conversion import Conversion
from rlhf_lightning.engines.forward import Head
from rlhf_lightning.parallel.layout import ParallelLayout
from rlhf_lightning.parallel.sharding import even_stages

_ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class Megatron:
    """How the engine spends memory and time.

    Raises:
        ValueError: a value is outside its range.
    """

    max_tokens_per_micro_batch: int = 0
    """Tokens computed at once on a device; a longer row is computed alone. 0: 2,048 on a CPU, else 16,384."""
    sequence_parallel: bool = False
    """Divide norms and residuals over the tensor ranks by token; without effect where t = 1."""
    chunks: int = 1
    """Runs of layers that a stage holds: above 1 the pipeline is interleaved, and its bubble smaller."""
    distributed_optimizer: bool = False
    """Divide masters and moments over the replicas; parameters then lie in one buffer that is Megatron's."""

    def __post_init__(self) -> None:
        if self.max_tokens_per_micro_batch < 0:
            raise ValueError(
                f"megatron.max_tokens_per_micro_batch={self.max_tokens_per_micro_batch}: is negative. "
                "Try 16384, or 0 to derive it."
            )
        if self.chunks < 1:
            raise ValueError(f"megatron.chunks={self.chunks}: a stage has a run of layers. Try 1.")

    def micro_batch_tokens(self, *, on_cpu: bool) -> int:
        """Tokens computed at once: as told, else what suits the device."""
        return self.max_tokens_per_micro_batch or (2048 if on_cpu else 16384)


def check_layout(
    config: PreTrainedConfig,
    layout: ParallelLayout,
    *,
    head: Head = "lm",
    settings: Megatron | None = None,
) -> None:
    """Refuse a layout that the model cannot be divided in.

    Args:
        config: of the Hugging Face model.
        layout: of the training.
        head: of the model.
        settings: of the engine.

    Raises:
        ValueError: the model is not converted, or p or t does not divide it; with the nearest choices.
    """
    conversion = Conversion(config, head=head)
    chunks = (settings or Megatron()).chunks
    _check_rope(config)
    fitting = [t for t in range(1, conversion.heads + 1) if not _indivisible(conversion, t)]
    if reason := _indivisible(conversion, layout.t):
        near = [max(n for n in fitting if n < layout.t), *[n for n in fitting if n > layout.t][:1]]
        raise ValueError(
            f"layout (train t={layout.t}): {reason}. Try train t={' or '.join(str(n) for n in near)}."
        )
    if layout.p == 1 and chunks > 1:
        raise ValueError(
            f"megatron.chunks={chunks} with train p=1: one stage has nothing to interleave. "
            "Try megatron.chunks=1, or train p=2."
        )
    even_stages(config.num_hidden_layers, layout.p, chunks=chunks)


def _indivisible(conversion: Conversion, t: int) -> str:
    """Why t tensor ranks cannot share the model; empty if they can."""
    heads, groups, inner = conversion.heads, conversion.groups, conversion.config.intermediate_size
    rows = (heads + 2 * groups) * conversion.head_size
    if heads % t:
        return f"t does not divide the {heads} attention heads"
    if inner % t:
        return f"t does not divide the {inner} columns of the feed-forward layers"
    if groups % t and t % groups:
        return f"t neither divides the {groups} key-value heads nor is a multiple of them"
    return f"t does not divide the {rows} rows of the fused query, key and value" if rows % t else ""


def _check_rope(config: PreTrainedConfig) -> None:
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _ROPES:
        raise ValueError(
            f"rope_type={kind!r}: the Megatron engine turns queries and keys by {', '.join(_ROPES)} only. "
            "Take another model, or the FSDP engine."
        )
