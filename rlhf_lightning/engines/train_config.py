"""What every training engine's configuration says, and what strategies, roles and the mapping ask of it."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlhf_lightning.engines.head import Head
from rlhf_lightning.parallel import ParallelLayout, Sharding, all_ranks
from rlhf_lightning.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class TrainConfig(metaclass=ABCMeta):  # below `ABC` the command line would take it for no dataclass
    """How an engine spends memory and time; `check` is abstract, the rest suits an engine of plain replicas.

    Raises:
        ValueError: a value is outside its range.
    """

    option: ClassVar[str]
    """What users type before the name of a field."""
    trains_adapters: ClassVar[bool] = False
    """Whether models may have adapters, which then train alone."""
    takes_sizes: ClassVar[bool] = False
    """Whether a strategy may divide each model in a (p, t) of its own."""

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
        """Refuse to go on without the package that the engine computes with, which is not imported yet.

        Raises:
            ValueError: it is not installed.
        """

    @abstractmethod
    def check(self, spec: ModelSpec, head: Head, layout: ParallelLayout) -> None:
        """Refuse a layout in which the engine cannot divide a model, without loading that.

        Raises:
            ValueError: as said, with what can be.
        """

    def layout(self, devices: int, *, name: str) -> ParallelLayout:
        """The layout of a model on devices where the strategy has no sizes of its own for it.

        Args:
            devices: all of the model's.
            name: of the model's role, for messages.

        Raises:
            ValueError: the devices cannot be divided as the options say.
        """
        return ParallelLayout(d=devices)

    def groups(self, layout: ParallelLayout, members: Sequence[int]) -> list[tuple[int, ...]]:
        """Global ranks of the groups that a model of this layout on these devices computes in."""
        return [tuple(members[rank] for rank in ranks) for ranks in all_ranks(layout)]

    def micro_batch_tokens(self, *, on_cpu: bool) -> int:
        """Tokens computed at once: as told, else what suits the device."""
        return self.max_tokens_per_micro_batch or (2048 if on_cpu else 16384)

    # ---- for the mapping; an engine with an option of such a name has a field instead ----------------------

    @property
    def sharding(self) -> Sharding:
        """What data-parallel ranks share out."""
        return "none"

    @property
    def shared_by(self) -> int:
        """Data-parallel ranks that share it out; 0: all."""
        return 0

    @property
    def kept_tokens(self) -> int:
        """Tokens of a scoring pass on a device whose activations stay for the update that follows."""
        return 0

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensor shards also share the activations between their matrix products."""
        return False

    @property
    def held_once(self) -> bool:
        """Whether an actor's training shard is a part of its generation shard."""
        return True

    def gathers_once(self, *, on_cpu: bool) -> bool:
        """Whether shared parameters are gathered and gradients reduced once an update, not a micro-batch."""
        return False
