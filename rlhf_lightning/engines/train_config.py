"""The base of training engines' configurations, and what strategies, roles and the mapping ask of them."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from rlhf_lightning.engines.head import Head
from rlhf_lightning.parallel import ParallelLayout, Sharding, all_ranks
from rlhf_lightning.retold import retold
from rlhf_lightning.spec import ModelSpec


def naming_path(spec: ModelSpec) -> AbstractContextManager[None]:
    """Put a model's path before errors about how it is divided: roles have models of their own."""
    return retold(lambda said: f"path={spec.path}: {said}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(metaclass=ABCMeta):  # below `ABC` the command line would take it for no dataclass
    """Options of a training engine. Only `check` is abstract: the others suit an engine of replicas."""

    option: ClassVar[str]
    """What users type before the name of a field, such as `strategy.settings.train`."""
    trains_adapters: ClassVar[bool] = False
    """Whether models may have adapters."""
    lends: ClassVar[bool] = False
    """Whether vLLM may generate in the memory of the training weights, on a CPU."""
    takes_sizes: ClassVar[bool] = False
    """Whether a strategy may choose p and t for each model."""
    masters_beside: ClassVar[bool] = False
    """Whether float32 masters lie beside the parameters in float32 too, and beside shards of them."""
    keeps_gradients: ClassVar[bool] = True
    """Whether the memory of gradients stays taken from one update to the next."""

    max_tokens_per_micro_batch: int = 0
    """Tokens computed at once on a device; a longer row is computed alone. 0: 2,048 on a CPU, else 16,384."""

    def __post_init__(self) -> None:
        budget = self.max_tokens_per_micro_batch
        if budget < 0:
            raise ValueError(
                f"{self.option}.max_tokens_per_micro_batch={budget}: is negative. "
                "Try 16384, or 0 to derive it."
            )

    @classmethod  # noqa: B027 - an engine may need no package of its own
    def require(cls) -> None:
        """Refuse to run without the engine's package, without importing it."""

    @abstractmethod
    def check(self, spec: ModelSpec, head: Head, layout: ParallelLayout) -> None:
        """Refuse a layout in which the engine cannot divide a model, without loading the model.

        Raises:
            ValueError: it cannot; the message names a layout that is possible.
        """

    def check_devices(self, *, gpu: bool) -> None:  # noqa: B027 - most engines need nothing there
        """Refuse devices that lack what the options need there, before anything starts."""

    def allows(self, layout: ParallelLayout, layers: int) -> bool:
        """Whether these options take a layout for a model of so many layers; for the mapping."""
        return self.takes_sizes or layout.p * layout.t == 1

    def layout(self, devices: int, *, name: str) -> ParallelLayout:
        """The layout of a model for which the strategy chooses no sizes itself.

        Args:
            devices: number of the model's devices.
            name: the role's, for messages.

        Raises:
            ValueError: the devices cannot be divided as the options say.
        """
        return ParallelLayout(d=devices)

    def groups(self, layout: ParallelLayout, members: Sequence[int]) -> list[tuple[int, ...]]:
        """Global ranks of the process groups that a model with this layout needs on these devices."""
        return [tuple(members[rank] for rank in ranks) for ranks in all_ranks(layout)]

    def micro_batch_tokens(self, *, on_cpu: bool) -> int:
        """Tokens computed at once: the option, or by default what suits the device."""
        return self.max_tokens_per_micro_batch or (2048 if on_cpu else 16384)

    # ---- for the mapping; an engine with an option of such a name has a field instead ----------------------

    @property
    def sharding(self) -> Sharding:
        """What is sharded over data-parallel ranks."""
        return "none"

    @property
    def shared_by(self) -> int:
        """Number of data-parallel ranks that it is sharded over; 0: all."""
        return 0

    @property
    def kept_tokens(self) -> int:
        """Tokens of a scoring pass on a device whose activations stay for the update that follows."""
        return 0

    @property
    def offload_optimizer(self) -> bool:
        """Whether masters and moments stay in the host's memory."""
        return False

    @property
    def offload_parameters(self) -> bool:
        """Whether weights stay there too while no layer needs them."""
        return False

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensor shards also share the activations between their matrix products."""
        return False

    @property
    def chunks(self) -> int:
        """Runs of layers in a pipeline stage."""
        return 1

    @property
    def held_once(self) -> bool:
        """Whether an actor's training shard is a part of its generation shard."""
        return True

    def reshards(self, *, on_cpu: bool) -> bool:
        """Whether sharded layers are freed after their forward pass, and gathered for the backward pass."""
        return True

    def defers(self, *, on_cpu: bool) -> bool:
        """Whether gradients of sharded parameters are reduced per update, not per micro-batch."""
        return False
