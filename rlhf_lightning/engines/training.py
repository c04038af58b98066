"""What every training engine does, whatever it computes with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.conversion import Conversion
from rlhf_lightning.engines.head import PLAIN, Asked
from rlhf_lightning.engines.native.decoder import Decoder
from rlhf_lightning.engines.offload import OffloadedParts, Part
from rlhf_lightning.functional.aggregate import Counts, Loss


@dataclass(frozen=True, kw_only=True)
class Transition:
    """Time and memory of the last transition from training to generation on one rank."""

    seconds: float = 0.0
    """Time until the last byte had arrived."""
    received_bytes: int = 0
    """Bytes of parameters received from other ranks."""
    training_bytes: int = 0
    """Memory of the parameters in training."""
    generation_bytes: int = 0
    """Memory of the parameters in generation, including those of training."""


@dataclass(frozen=True)
class Shard:
    """One rank's generation shard, in memory that it shares with the training parameters."""

    conversion: Conversion
    """Names and shapes of the whole model."""
    tensors: Mapping[str, Tensor]
    """Tensors by `Sharded.name`, as `HybridBuffer.gather` returns them."""
    chunks: int
    """Number of training shards that each divided tensor consists of, in order."""


class WeightSource:
    """Where a generation engine's weights come from."""

    version: int = 0
    """How many times the weights have changed."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter, whole, under its Hugging Face name, in the dtype of the computation.

        Each is valid until the next, so that no rank holds a copy of the model. Collective: all ranks of a
        replica must read to the end. A tied output layer may be left out.
        """
        raise NotImplementedError(f"{type(self).__name__} gives no weights to other engines.")

    def lending(self) -> AbstractContextManager[Shard] | None:
        """Lend the generation shard to an engine that computes in place; None where there is none to lend.

        The borrower must drop the tensors before the context ends, which else cannot free their memory.
        """
        return None


class TrainEngine(WeightSource, ABC):
    """One model, trained and evaluated by the ranks of one group, each with rows of its own.

    Every method but `free_kept`, `offload`, `reload`, `reload_bytes` and `memory` is collective: all ranks of
    the group call it, with any number of rows, zero included. Rows are TensorDicts of the columns that
    `docs/own_algorithm.md` lists.
    """

    accumulated = False
    """Whether there are gradients that no step has used; `accumulate` and `optimizer_step` set it."""
    _last = Transition()
    """What `transition` returns; `generating` sets it."""
    _offloaded: OffloadedParts
    """The parts of the model that are off the device; set by each engine that holds a model."""

    @abstractmethod
    def infer(
        self, rows: TensorDict, *, temperature: float, asked: Asked = PLAIN, keep: bool = False
    ) -> TensorDict:
        """Evaluate without a gradient.

        Args:
            rows: n rows with prompt_ids, prompt_mask [n, P], response_ids, response_mask [n, R].
            temperature: divides the logits; 0 (greedy) counts as 1. Without meaning for numbers per token.
            asked: what a language model computes beside log-probabilities.
            keep: an update of the same rows with the same weights may follow: an engine with an option for it
                keeps the autograd graph of this pass.

        Returns:
            log_probs and, if asked for, entropy [n, R] float32, candidate_log_probs [n, R, k] float32, and
            the likeliest words as candidate_ids [n, R, k] int32; or values [n, R] float32. All are 0 outside
            the response mask.
        """

    @abstractmethod
    def accumulate(
        self, rows: TensorDict, loss: Loss, counts: Counts, *, temperature: float
    ) -> dict[str, Tensor]:
        """Add the gradient of the loss of these rows to the gradients.

        Args:
            rows: as for `infer`, with the columns that the loss reads.
            loss: called once per micro-batch.
            counts: what the loss divides by, counted over the rows of all ranks.
            temperature: as for `infer`.

        Returns:
            The loss's metrics, summed over the rows of this rank: scalars on the host.
        """

    def free_kept(self) -> None:
        """Free what `infer` and a generation kept for an update; does nothing where nothing is kept."""

    @abstractmethod
    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradients, step, and clear them; returns grad_norm, lr and skipped_steps."""

    @abstractmethod
    def generating(self) -> AbstractContextManager[Decoder]:
        """Within this context, the model as the native generator computes with it."""

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights of a model of the same architecture, as yielded by its `weights`.

        Raises:
            ValueError: they are the weights of another architecture.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no weights from other engines.")

    def transition(self) -> Transition:
        """Time and memory of the last `generating` or `lending`; zeros where nothing moves."""
        return self._last

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write weights, optimizer state and counters, in a form that any number of ranks can load."""

    @abstractmethod
    def load(self, directory: Path, *, trained: bool = True) -> None:
        """Continue from `save`, of whichever engine and layout.

        Args:
            directory: what `save` was given.
            trained: False takes the weights alone, to evaluate them.

        Raises:
            ValueError: there is no complete checkpoint, or it is of another model.
        """

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write a Hugging Face directory with the weights in the dtype of the computation."""

    def give_weights(self, *, wanted: bool = True) -> Tensor:
        """All weights as one vector in the order of the model: [N] float32 on the host. Collective.

        Where they are not `wanted`, a rank only takes part in gathering, and returns an empty tensor.
        """
        raise NotImplementedError(f"{type(self).__name__} gives no weights to other models.")

    def follow_weights(self, weights: Tensor, *, decay: float) -> None:
        """Average with another model: decay * own weights + (1 - decay) * `weights`.

        Args:
            weights: [N] float32 from `give_weights` of a model of the same architecture.
            decay: share of the own weights, in [0, 1].

        Raises:
            ValueError: they are the weights of another architecture.
        """
        raise NotImplementedError(f"{type(self).__name__} follows no other model.")

    def offload(self, parts: Iterable[Part]) -> None:
        """Move these parts to the host until `reload`; on a CPU nothing moves, but using them is refused.

        From a step to the next micro-batch nobody needs gradients: they are freed, and made anew as zeros.
        """
        zeros: tuple[Part, ...] = () if self.accumulated else ("gradients",)
        self._offloaded.offload(parts, self._tensors, zeros=zeros)

    def reload(self, parts: Iterable[Part]) -> None:
        """Bring these parts back to the device; those that are there stay as they are."""
        self._offloaded.reload(parts)

    def reload_bytes(self) -> int:
        """Bytes that `reload` of all parts would bring back to the device."""
        return self._offloaded.size_bytes

    @property
    def memory_owner(self) -> TrainEngine:
        """The engine that owns the memory it computes in; itself by default."""
        return self

    def memory(self) -> dict[str, int]:
        """Bytes of each part that this rank holds on the device, and of all parts offloaded under `host`."""
        return self._offloaded.memory(self._tensors)

    def _tensors(self, part: Part) -> list[Tensor]:
        """The tensors of a part, of an engine that holds a model."""
        raise NotImplementedError(f"{type(self).__name__} holds no {part}.")
