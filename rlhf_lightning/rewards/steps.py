"""Where the steps of a response end, for process rewards."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def step_ends(pieces: Sequence[str], separator: str) -> list[int]:
    r"""Find the tokens that end a step: those in which a separator ends, and the last one.

    The last token ends no step of its own where nothing but white space has come since the last separator.

    Args:
        pieces: the text of each token, empty for special tokens.
        separator: what stands between steps.

    Returns:
        Indices of tokens, each once, in order.

    Example:
        >>> step_ends(["one", ".\n", "\n", "two", ""], "\n")
        [1, 2, 4]
    """
    text, ends = "".join(pieces), list(accumulate(map(len, pieces)))
    found: list[int] = []
    done = 0
    while (place := text.find(separator, done)) >= 0:
        done = place + len(separator)
        found.append(bisect_left(ends, done))
    if pieces and (text[done:].strip() or not found):
        found.append(len(pieces) - 1)
    return list(dict.fromkeys(found))
