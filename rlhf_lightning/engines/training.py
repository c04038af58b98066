"""What every training engine does, whatever it computes with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.conversion import Conversion
from rlhf_lightning.engines.native.decoder import Decoder
from rlhf_lightning.functional.aggregate import Counts, Loss

Part = Literal["parameters", "gradients", "optimizer"]
"""What of a model can be kept off the device."""
PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Transition:
    """What the last way from training to generation took on one rank."""

    seconds: float = 0.0
    """Until the last byte was here."""
    received_bytes: int = 0
    """Parameters that other ranks gave."""
    training_bytes: int = 0
    """Memory of the parameters in training."""
    generation_bytes: int = 0
    """Memory of the parameters in generation, those of training among them."""


@dataclass(frozen=True)
class Shard:
    """What one rank generates with, in the memory in which its part of it trains."""

    conversion: Conversion
    """Names and shapes of the whole model."""
    tensors: Mapping[str, Tensor]
    """By `Sharded.name`, as `HybridBuffer.gather` gives them."""
    chunks: int
    """Training shards, one behind the other, in each that is divided."""


class WeightSource(ABC):  # noqa: B024 - each says what it can give
    """Where a generation engine's weights come from."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, under its Hugging Face name, in the type of the computation.

        One after the other, and each only until the next: no rank holds a copy of the model. All ranks of a
        replica read to the end; a tied output layer may be left out.
        """
        raise NotImplementedError(f"{type(self).__name__} gives no weights to other engines.")

    def lending(self) -> AbstractContextManager[Shard] | None:
        """The generation shard for an engine that computes where it lies; None where there is none to lend.

        Whoever asks lets go of the tensors before the end, or the memory of other ranks' parameters stays.
        """
        return None

    @property
    def version(self) -> int | None:
        """How often the weights have changed; None: not counted, and to be taken for changed."""
        return None


class TrainEngine(WeightSource):
    """One model, trained and evaluated by the ranks of one group, each with rows of its own.

    Every method but `offload`, `reload`, `away_bytes` and `memory` is collective: all ranks of the group call
    it, with any number of rows, zero included. Rows are TensorDicts of the columns that
    `docs/own_algorithm.md` lists.
    """

    @abstractmethod
    def infer(
        self, rows: TensorDict, *, temperature: float, entropy: bool = False, keep: bool = False
    ) -> TensorDict:
        """Evaluate without a gradient.

        Args:
            rows: n rows with prompt_ids, prompt_mask [n, P], response_ids, response_mask [n, R].
            temperature: divides the logits; 0 (greedy) counts as 1. Without meaning for numbers per token.
            entropy: whether a language model computes the entropy too.
            keep: an update of the same rows by the same weights may follow; an engine that can, and was told
                to, keeps what leads back from this pass.

        Returns:
            log_probs and, if asked for, entropy; or values: [n, R] float32, 0 outside the response mask.
        """

    @abstractmethod
    def accumulate(
        self, rows: TensorDict, loss: Loss, counts: Counts, *, temperature: float
    ) -> dict[str, Tensor]:
        """Add the gradient of the loss of these rows to the gradients.

        Args:
            rows: as for `infer`, with the columns that the loss reads.
            loss: called once a micro-batch.
            counts: of the rows of all ranks, that the loss divides by.
            temperature: as for `infer`.

        Returns:
            The loss's metrics, summed over the rows of this rank: scalars on the host.
        """

    @abstractmethod
    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradients, step, and clear them; returns grad_norm, lr and skipped_steps."""

    @abstractmethod
    def generating(self) -> AbstractContextManager[Decoder]:
        """The model as a generator computes with it, in the type of the computation."""

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Become a model of the same architecture, given as `weights` gives it; read to the end.

        Raises:
            ValueError: they are the weights of another architecture.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no weights from other engines.")

    def transition(self) -> Transition:
        """What the last `generating` took; nothing where nothing moves."""
        return Transition()

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write weights, optimizer state and counters, in a form that any number of ranks can load."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Continue from `save`.

        Raises:
            ValueError: there is no complete checkpoint, or it is of another model.
        """

    def load_weights(self, directory: Path) -> None:
        """Take the weights of a checkpoint, to evaluate them; the rest too where an engine reads no less.

        Raises:
            ValueError: there is no complete checkpoint, or it is of another model.
        """
        self.load(directory)

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write a Hugging Face directory with the weights in the type of the computation."""

    def give_weights(self, *, wanted: bool = True) -> Tensor:
        """All weights, one behind the other in the order of the model: [N] float32 on the host.

        All ranks call it; those where they are not wanted hold one parameter at a time, and return [0].
        """
        raise NotImplementedError(f"{type(self).__name__} gives no weights to other models.")

    def follow_weights(self, weights: Tensor, *, decay: float) -> None:
        """Become `decay` of these weights and the rest of others.

        Args:
            weights: of a model of the same architecture, as from `give_weights`.
            decay: share of the own weights, in [0, 1].

        Raises:
            ValueError: they are the weights of another architecture.
        """
        raise NotImplementedError(f"{type(self).__name__} follows no other model.")

    def offload(self, parts: Iterable[Part]) -> None:
        """Free the device of these parts until `reload`; an engine that cannot keeps them."""

    def reload(self, parts: Iterable[Part]) -> None:
        """Bring these parts back; those that are not away stay as they are."""

    def away_bytes(self) -> int:
        """What `reload` of all parts would take on the device."""
        return 0

    @property
    def lies_in(self) -> TrainEngine:
        """The engine whose memory it computes in."""
        return self

    def memory(self) -> dict[str, int]:
        """Bytes of each part that this rank holds on the device, and of all parts offloaded under `host`."""
        return dict.fromkeys((*PARTS, "host"), 0)
