"""How the FSDP engine spends memory."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_lightning.engines.shards import Schedule
from rlhf_lightning.parallel.layout import Generation, ParallelLayout


@dataclass(frozen=True, kw_only=True)
class FSDP:
    """How the engine spends memory.

    Raises:
        ValueError: a value is outside its range.
    """

    max_tokens_per_micro_batch: int = 0
    """Tokens computed at once on a device; a longer row is computed alone. 0: 2,048 on a CPU, else 16,384."""
    kept_tokens: int = 0
    """Tokens of `compute_values` or `compute_log_prob` on a device whose activations stay for an update of
    the same rows, which then goes back at once; it needs all weights on the device. 0: none."""
    shard: int = 0
    """Neighbouring ranks that divide one copy of a model's weights; the others hold copies of it. 0: all."""
    tensor: int = 1
    """Neighbouring devices that divide every layer, over the same rows; `shard` counts them as one rank."""
    reshard_after_forward: bool | None = None
    """Free a layer after its forward pass and gather it again for the backward pass. None: not on a CPU."""
    defer_gradient_reduction: bool | None = None
    """Keep whole gradients between micro-batches and reduce them once, after the last. None: on a CPU."""

    def __post_init__(self) -> None:
        budget = self.max_tokens_per_micro_batch
        if budget < 0:
            raise ValueError(
                f"fsdp.max_tokens_per_micro_batch={budget}: is negative. Try 16384, or 0 to derive it."
            )
        if self.kept_tokens < 0:
            raise ValueError(f"fsdp.kept_tokens={self.kept_tokens}: is negative. Try 0, which keeps nothing.")
        if self.shard < 0:
            raise ValueError(f"fsdp.shard={self.shard}: is negative. Try 0, which divides over all ranks.")
        if self.tensor < 1:
            raise ValueError(f"fsdp.tensor={self.tensor}: a layer has one device at least. Try 1.")

    def layout(self, devices: int, *, name: str) -> ParallelLayout:
        """The layout of a model on devices: groups of `tensor` divide its layers; each has rows of its own.

        To generate, every device has all of the model.

        Args:
            devices: all of the model's.
            name: of the model's role, for messages.

        Raises:
            ValueError: `tensor` does not divide the devices.
        """
        if self.tensor == 1:
            return ParallelLayout(d=devices)
        if devices % self.tensor:
            fitting = max(self.tensor, devices // self.tensor * self.tensor)
            raise ValueError(
                f"strategy.settings.train.tensor={self.tensor}: {self.tensor} does not divide the {devices} "
                f"devices of {name}. Try {fitting} devices for it."
            )
        return ParallelLayout(t=self.tensor, d=devices // self.tensor, generation=Generation())

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuse a layout that is not what these options ask for.

        Raises:
            ValueError: other tensor ranks, stages, or ranks that do not divide into copies.
        """
        if (layout.p, layout.t) != (1, self.tensor):
            other = "tensor=1 here" if self.tensor > 1 else "--strategy.settings.engine megatron"
            raise ValueError(
                f"strategy.settings.train.tensor={self.tensor} with train p={layout.p}, t={layout.t}: the "
                f"strategy divides the models itself. Try {other}, or --strategy colocated."
            )
        self.check_ranks(layout.d)

    def check_ranks(self, ranks: int) -> None:
        """Refuse ranks that do not divide into copies, or keep passes of parts; one rank divides nothing.

        Raises:
            ValueError: as said.
        """
        if self.shard and ranks > 1 and ranks % self.shard:
            fitting = [str(size) for size in range(1, ranks + 1) if ranks % size == 0]
            raise ValueError(
                f"fsdp.shard={self.shard} on {ranks} ranks: {self.shard} does not divide {ranks}. "
                f"Try {', '.join(fitting)}."
            )
        if self.kept_tokens and (self.tensor > 1 or (ranks > 1 and self.shard != 1)):
            raise ValueError(
                f"fsdp.kept_tokens={self.kept_tokens} with shard={self.shard} and tensor={self.tensor} on "
                f"{ranks} ranks: only a device with all weights keeps passes. Try shard=1 and tensor=1, or "
                "kept_tokens=0."
            )

    def micro_batch_tokens(self, *, on_cpu: bool) -> int:
        """Tokens computed at once: as told, else what suits the device."""
        return self.max_tokens_per_micro_batch or (2048 if on_cpu else 16384)

    def schedule(self, *, on_cpu: bool) -> Schedule:
        """When memory is given back: as told, else what suits the device."""
        reshard, defer = self.reshard_after_forward, self.defer_gradient_reduction
        return Schedule(
            reshard_after_forward=not on_cpu if reshard is None else reshard,
            defer_reduction=on_cpu if defer is None else defer,
        )
