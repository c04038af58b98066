"""Options of the FSDP engine, and which layouts and ranks they allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlhf_lightning.engines.fsdp.compilation import check_compiler
from rlhf_lightning.engines.fsdp.mesh import mesh_groups
from rlhf_lightning.engines.head import Head
from rlhf_lightning.engines.huggingface.architecture import check_tensor_parallel
from rlhf_lightning.engines.train_config import TrainConfig
from rlhf_lightning.parallel import Generation, ParallelLayout, Sharding, subgroups
from rlhf_lightning.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class FSDP(TrainConfig):
    """Options of the FSDP engine."""

    option: ClassVar[str] = "strategy.settings.train"
    trains_adapters: ClassVar[bool] = True
    keeps_gradients: ClassVar[bool] = False

    kept_tokens: int = 0
    """Tokens per device for which work is kept for an update of the same rows: of `compute_values` and
    `compute_log_prob` the activations, so that the update only runs the backward pass; of
    `generate_sequences` the matrix products. Needs all weights on the device. 0: none."""
    shard: int = 0
    """Neighbouring ranks that divide one copy of a model's weights; the others hold copies of it. 0: all."""
    tensor: int = 1
    """Neighbouring devices that divide every layer, over the same rows; `shard` counts them as one rank."""
    reshard_after_forward: bool | None = None
    """Free a layer after its forward pass and gather it again for the backward pass. None: not on a CPU."""
    defer_gradient_reduction: bool | None = None
    """Keep whole gradients between micro-batches and reduce them once, after the last. None: on a CPU."""
    compile_layers: bool = False
    """Train and score with layers that `torch.compile` compiles, which makes the first iterations slower."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, zero in (("kept_tokens", "keeps nothing"), ("shard", "divides over all ranks")):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{self.option}.{name}={value}: is negative. Try 0, which {zero}.")
        if self.compile_layers and self.tensor > 1:
            raise ValueError(
                f"strategy.settings.train.compile_layers=true with tensor={self.tensor}: divided layers are "
                "not compiled. Try tensor=1, or compile_layers=false."
            )
        if self.tensor < 1:
            raise ValueError(
                f"strategy.settings.train.tensor={self.tensor}: a layer has one device at least. Try 1."
            )

    def layout(self, devices: int, *, name: str) -> ParallelLayout:
        """See `TrainConfig.layout`: groups of `tensor` divide the layers; each has rows of its own.

        To generate, every device has all of the model.
        """
        if self.tensor == 1:
            return super().layout(devices, name=name)
        if devices % self.tensor:
            fitting = max(self.tensor, devices // self.tensor * self.tensor)
            raise ValueError(
                f"strategy.settings.train.tensor={self.tensor}: {self.tensor} does not divide the {devices} "
                f"devices of {name}. Try {fitting} devices for it."
            )
        return ParallelLayout(t=self.tensor, d=devices // self.tensor, generation=Generation())

    def groups(self, layout: ParallelLayout, members: Sequence[int]) -> list[tuple[int, ...]]:
        """See `TrainConfig.groups`; those of the model's mesh too. Without tensor ranks, none of one rank."""
        found = subgroups(layout, members) if layout.t == 1 else super().groups(layout, members)
        ranks = [[members[rank] for rank in row] for row in layout.groups("t")]
        return list(dict.fromkeys([*found, *mesh_groups(ranks, shard=self.shard)]))

    def check(self, spec: ModelSpec, head: Head, layout: ParallelLayout) -> None:
        """See `TrainConfig.check`: the layout must be that of these options, and must divide the layers."""
        if (layout.p, layout.t) != (1, self.tensor):
            other = "tensor=1 here" if self.tensor > 1 else "--strategy.settings.engine megatron"
            raise ValueError(
                f"strategy.settings.train.tensor={self.tensor} with train p={layout.p}, t={layout.t}: the "
                f"strategy divides the models itself. Try {other}, or --strategy colocated."
            )
        self.check_ranks(layout.d)
        if spec.lora is not None and self.tensor > 1:
            raise ValueError(
                f"lora with strategy.settings.train.tensor={self.tensor}: layers with adapters are not "
                "divided. Try tensor=1, or leave lora out."
            )
        check_tensor_parallel(spec, head, layout.t)

    def check_devices(self, *, gpu: bool) -> None:
        """See `TrainConfig.check_devices`: layers are compiled by a compiler that suits the devices."""
        if self.compile_layers:
            check_compiler(gpu=gpu)

    def allows(self, layout: ParallelLayout, layers: int) -> bool:
        """See `TrainConfig.allows`; the sizes that `tensor` asks for are left to `check`."""
        return super().allows(layout, layers) and self._divides(layout.d) and self._keeps(layout.d)

    def _divides(self, ranks: int) -> bool:
        """Whether `shard` divides the ranks; one rank holds all, whatever it says."""
        return not self.shard or ranks == 1 or ranks % self.shard == 0

    def _keeps(self, ranks: int) -> bool:
        """Whether each rank has all weights, if passes are to be kept."""
        return not self.kept_tokens or ranks == 1 or self.shard == 1

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks that `shard` does not divide, or that cannot keep `kept_tokens`."""
        if not self._divides(ranks):
            fitting = [str(size) for size in range(1, ranks + 1) if ranks % size == 0]
            raise ValueError(
                f"strategy.settings.train.shard={self.shard} on {ranks} ranks: {self.shard} does not divide "
                f"{ranks}. Try {', '.join(fitting)}."
            )
        if not self._keeps(ranks) or (self.kept_tokens and self.tensor > 1):
            raise ValueError(
                f"strategy.settings.train.kept_tokens={self.kept_tokens} with shard={self.shard} and "
                f"tensor={self.tensor} on {ranks} ranks: only a device with all weights keeps passes. "
                "Try shard=1 and tensor=1, or kept_tokens=0."
            )

    @property
    def sharding(self) -> Sharding:
        """See `TrainConfig.sharding`."""
        return "none" if self.shard == 1 else "full"

    @property
    def shared_by(self) -> int:
        """See `TrainConfig.shared_by`."""
        return self.shard

    def reshards(self, *, on_cpu: bool) -> bool:
        """See `TrainConfig.reshards`: the option, or by default what suits the device."""
        return not on_cpu if self.reshard_after_forward is None else self.reshard_after_forward

    def defers(self, *, on_cpu: bool) -> bool:
        """See `TrainConfig.defers`, as `reshards`."""
        return on_cpu if self.defer_gradient_reduction is None else self.defer_gradient_reduction
