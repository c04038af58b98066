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
    """Answers prompts with a model's current weights; all ranks of a copy call it with the same rows."""

    source: WeightSource
    """Where the weights come from."""

    def generate(self, rows: TensorDict, *, sampling: Sampling, seed: int) -> TensorDict:
        """Answer every row. An answer depends on the row's prompt, its id and the seed only.

        Args:
            rows: `prompt_ids` [B, P] int64, `prompt_mask` [B, P] bool, `row_ids` [B] int64.
            sampling: length, temperature, truncation, and what ends a response.
            seed: of the draws.

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
        """Answer every row as `generate` does, and yield finished ones while the others continue.

        The caller must read to the end, or close the iterator, before the weights change.

        Args:
            rows: as for `generate`.
            sampling: as for `generate`.
            seed: as for `generate`.
            parts: how many times to yield; each time the next B / parts finished rows, one more or less.

        Yields:
            The numbers of n rows, [n] int64, ascending, and what `generate` returns for them.

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
        """Continue answers until told to pause, and return what each has so far.

        The caller may continue later with the rows returned. The weights may change in between: prompts and
        what follows them are computed anew. While the weights stay, a pause changes no answer, since a token
        is drawn by its row's id, its position and the seed. (Rounding differs by 1e-6, and may decide between
        two tokens that are equally likely.)

        Args:
            rows: as for `generate`; rows begun before also have `response_ids`, `response_mask`, `log_probs`
                [B, R] and `ended` [B] bool, as they were returned.
            sampling: as for `generate`, the same every time.
            seed: as for `generate`, the same every time.
            pause: called with `ended` [B] bool before each step, which draws one token for every row being
                decoded; must return the same on all ranks of a copy.
            at_once: most rows decoded at once, the first rows first; 0 leaves it to the engine.

        Returns:
            What `generate` returns, of the responses so far, and `ended` [B] bool, whether they are finished.
            Each of `log_probs` is under the weights that drew the token.

        Raises:
            ValueError: as for `generate`; or responses were begun with another R.
        """

    @contextmanager
    def weights_held(self) -> Iterator[None]:
        """Hold the gathered weights over several calls of `resume`.

        All ranks of the model enter together; within, copies may call `resume` different numbers of times.
        """
        yield

    def refresh(self) -> None:  # noqa: B027
        """Take the source's weights now rather than before the next answers; by default does nothing."""

    def offload(self) -> None:  # noqa: B027
        """Free what generation needs beside the model, until the next call; by default there is nothing."""
