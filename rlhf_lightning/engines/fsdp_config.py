"""How the FSDP engine spends memory."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_lightning.engines.shards import Schedule


@dataclass(frozen=True, kw_only=True)
class FSDP:
    """How the engine spends memory.

    Raises:
        ValueError: a value is outside its range.
    """

    max_tokens_per_micro_batch: int = 0
    """Tokens computed at once on a device; a longer row is computed alone. 0: 2,048 on a CPU, else 16,384."""
    shard: int = 0
    """Neighbouring ranks that divide one copy of a model's weights; the others hold copies of it. 0: all."""
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
        if self.shard < 0:
            raise ValueError(f"fsdp.shard={self.shard}: is negative. Try 0, which divides over all ranks.")

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks that do not divide into copies; one rank has nothing to divide.

        Raises:
            ValueError: as said.
        """
        if self.shard and ranks > 1 and ranks % self.shard:
            fitting = [str(size) for size in range(1, ranks + 1) if ranks % size == 0]
            raise ValueError(
                f"fsdp.shard={self.shard} on {ranks} ranks: {self.shard} does not divide {ranks}. "
                f"Try {', '.join(fitting)}."
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
