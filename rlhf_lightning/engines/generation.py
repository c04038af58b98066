"""What every generation engine does, whatever it computes with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tensordict import TensorDict
from torch import Tensor

from rlhf_lightning.engines.training import WeightSource
from rlhf_lightning.spec import Sampling


class GenerationEngine(ABC):
    """Answers prompts with the present weights of a model; all ranks of a copy call it with the same rows."""

    source: WeightSource
    """Has the weights."""

    def generate(self, rows: TensorDict, *, sampling: Sampling, seed: int) -> TensorDict:
        """Answer every row; what a row answers depends on its prompt, its id and the seed only.

        Args:
            rows: `prompt_ids` [B, P] int64, `prompt_mask` [B, P] bool, `row_ids` [B] int64.
            sampling: length, temperature, truncation, and what ends a response.
            seed: Another seed, other tokens.

        Returns:
            `response_ids` [B, R] int64, right-padded; `response_mask` [B, R] bool, True up to its end;
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

    @abstractmethod
    def resume(
        self,
        rows: TensorDict,
        *,
        sampling: Sampling,
        seed: int,
        pause: Callable[[Tensor], bool],
        at_once: int = 0,
    ) -> TensorDict:
        """Go on with answers until told to pause, and hand back what each has so far.

        Whoever calls it goes on later, with the rows that it returned, or never; the weights may change in
        between, and prompts with what follows them are then computed anew. Pauses change no answer while the
        weights stay: a token is drawn by its row's id, its place and the seed. (Rounding differs, 1e-6, and
        may decide between two tokens that are equally likely.)

        Args:
            rows: as for `generate`; those that were begun before have `response_ids`, `response_mask`,
                `log_probs` [B, R] and `ended` [B] bool too, as they were returned.
            sampling: as for `generate`, the same every time.
            seed: as for `generate`, the same every time.
            pause: asked before each step, a token for every row that is decoded, with `ended` [B] bool; all
                ranks of a copy answer alike.
            at_once: most rows decoded at once, the first ones first; 0 leaves it to the engine.

        Returns:
            What `generate` returns, of what was said so far, and `ended` [B] bool: whether that is all.
            Each of `log_probs` is of the weights that drew the token.

        Raises:
            ValueError: as for `generate`; or responses were begun with another R.
        """

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the present weights at hand for several calls of `resume`.

        Ranks of other copies may call it more often, or less; all ranks of the model open it together.
        """
        yield

    @property
    @abstractmethod
    def version(self) -> int | None:
        """`TrainEngine.version` of the weights that gave the last answers; None before the first."""

    def refresh(self) -> None:  # noqa: B027
        """Take the source's weights now, not before the next answers; by default there is nothing to take."""

    def offload(self) -> None:  # noqa: B027
        """Free what generation needs until the next; by default there is nothing beside the model."""
