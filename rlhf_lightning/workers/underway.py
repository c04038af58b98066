"""A generation that spans several calls of a worker."""

from __future__ import annotations

from collections.abc import Iterator

from tensordict import TensorDict


class Underway:
    """Holds an unfinished generation, and continues it at each call."""

    def __init__(self) -> None:
        self._answers: Iterator[TensorDict] = iter(())
        self._left = 0

    def begin(self, answers: Iterator[TensorDict], *, parts: int) -> None:
        """Hold a generation that yields its answers in `parts` parts."""
        self._answers, self._left = answers, parts

    def more(self) -> TensorDict:
        """Generate and return the next part; after the last one the generation has released its weights.

        Raises:
            RuntimeError: there is none left, because an earlier part failed.
        """
        found = next(self._answers, None)
        if found is None:
            raise RuntimeError("no generation is under way: the part before this one failed.")
        self._left -= 1
        if not self._left:
            rest = next(self._answers, None)
            assert rest is None
        return found
