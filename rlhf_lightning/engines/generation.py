"""What answers prompts with the weights that a training engine has, chosen by the type of its configuration.

Whoever calls it names no engine: roles ask for one here, as they do for training in `training`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.engine import TrainEngine, WeightSource
from rlhf_lightning.engines.native import Native, NativeGenerator
from rlhf_lightning.engines.vllm import VLLM
from rlhf_lightning.parallel import Seat
from rlhf_lightning.spec import ModelSpec, Sampling


@dataclass(frozen=True, kw_only=True)
class Ends:
    """How responses end."""

    pad_token_id: int
    """What stands behind a response."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response, beside those of `Sampling`."""


class GenerationEngine(ABC):
    """Answers prompts with the present weights of a model; all ranks of a copy call it with the same rows."""

    source: WeightSource
    """Has the weights."""

    def generate(self, rows: TensorDict, *, sampling: Sampling, seed: int) -> TensorDict:
        """Answer every row; what a row answers depends on its prompt, its id and the seed only.

        Args:
            rows: `prompt_ids` [B, P] int64, `prompt_mask` [B, P] bool, `row_ids` [B] int64.
            sampling: Length, temperature, truncation and stop tokens.
            seed: Another seed, other tokens.

        Returns:
            `response_ids` [B, R] int64, right-padded; `response_mask` [B, R] bool, True up to the stop token;
            `log_probs` [B, R] float32, natural log, at the sampling temperature, before truncation, 0 outside
            the mask.

        Raises:
            ValueError: a prompt is empty, or too long for the model.
        """
        ((_, answers),) = self.finished(rows, sampling=sampling, seed=seed, parts=1)
        return answers

    @abstractmethod
    def finished(
        self, rows: TensorDict, *, sampling: Sampling, seed: int, parts: int
    ) -> Iterator[tuple[Tensor, TensorDict]]:
        """Answer every row as `generate` does, and hand over those that end first while the others go on.

        Whoever asks goes on to the end, or closes the iterator, before the weights change.

        Args:
            rows: as for `generate`.
            sampling: as for `generate`.
            seed: as for `generate`.
            parts: how often to hand over; each time the next B / parts rows, one more or less.

        Yields:
            Numbers of rows [n] int64, ascending, and what `generate` returns of them.

        Raises:
            ValueError: as for `generate`.
        """

    @property
    @abstractmethod
    def version(self) -> int | None:
        """`TrainEngine.version` of the weights that gave the last answers; None before the first."""

    def offload(self) -> None:  # noqa: B027
        """Free what generation needs until the next; by default there is nothing beside the model."""


class NativeEngine(GenerationEngine):
    """The native generator over what the training engine generates with.

    Args:
        source: has the weights.
        seat: of this rank.
        ends: of responses.
        config: memory.
    """

    def __init__(self, source: TrainEngine, *, seat: Seat, ends: Ends, config: Native) -> None:
        self.source: TrainEngine = source
        self._device, self._ends, self._config = seat.device, ends, config
        self._version: int | None = None

    def finished(
        self, rows: TensorDict, *, sampling: Sampling, seed: int, parts: int
    ) -> Iterator[tuple[Tensor, TensorDict]]:
        """See `GenerationEngine.finished`."""
        with self.source.generating() as decoder:
            yield from NativeGenerator(
                decoder,
                device=self._device,
                pad_token_id=self._ends.pad_token_id,
                eos_token_ids=self._ends.eos_token_ids,
                config=self._config,
            ).finished(rows, sampling=sampling, seed=seed, parts=parts)
            del decoder  # a layout of generation is freed as it ends
        self._version = self.source.version

    @property
    def version(self) -> int | None:
        """See `GenerationEngine.version`."""
        return self._version


def generation_engine(
    model: ModelSpec, source: WeightSource, *, seat: Seat, ends: Ends, config: Native | VLLM
) -> GenerationEngine:
    """Make what generates on one rank; all ranks of a copy call it.

    Args:
        model: that the source trains.
        source: has the weights; for the native engine it is a training engine.
        seat: of this rank.
        ends: of responses.
        config: of the engine; its type chooses.

    Raises:
        ValueError: the engine cannot generate with the model.
    """
    if isinstance(config, Native):
        assert isinstance(source, TrainEngine)
        return NativeEngine(source, seat=seat, ends=ends, config=config)
    # vLLM takes ten seconds to import, and only its own engine needs it.
    engine: type[GenerationEngine] = import_module("rlhf_lightning.engines.vllm.engine").VLLMEngine
    return engine(model, source, seat=seat, ends=ends, config=config)  # type: ignore[call-arg]
