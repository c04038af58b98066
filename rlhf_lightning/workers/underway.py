"""A generation of which some answers are still to come, between two calls of a worker."""

from __future__ import annotations

from collections.abc import Iterator

from tensordict import TensorDict


class Underway:
    """Goes on with one generation each time it is asked."""

    def __init__(self) -> None:
        self._answers: Iterator[TensorDict] = iter(())
        self._left = 0

    def begin(self, answers: Iterator[TensorDict], *, parts: int) -> None:
        """Take up a generation that hands over its answers in so many parts."""
        self._answers, self._left = answers, parts

    def more(self) -> TensorDict:
        """The next part; after the last the generation has let go of its weights.

        Raises:
            RuntimeError: there is none, since a part before failed.
        """
        found = next(self._answers, None)
        if found is None:
            raise RuntimeError("no generation is under way: the part before this one failed.")
        self._left -= 1
        if not self._left:
            rest = next(self._answers, None)
            assert rest is None
        return found
