"""What a loss or an estimator of the user's own reads, and was not given because it did not ask for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def reading(whose: str, **given: Mapping[str, Tensor]) -> Iterator[None]:
    """Within this context a KeyError says which name was looked up, what there is, and how to ask for it.

    Args:
        whose: class of the loss or the estimator.
        **given: what it is called with, by parameter.

    Raises:
        ValueError: a name was looked up that is in nothing that was given.
    """
    try:
        yield
    except KeyError as err:
        if not err.args or any(err.args[0] in names for names in given.values()):
            raise
        outputs = sorted(given.get("outputs", ()))
        fix = ", or read ".join(["Name the column in its `columns`", *(f"outputs[{n!r}]" for n in outputs)])
        if err.args[0] == "entropy" and "log_probs" in outputs:
            fix = "Let its `needs_entropy` be True"
        there = " and ".join(f"{what} {sorted(names)}" for what, names in given.items())
        raise ValueError(f"{whose} reads {err.args[0]!r}, and is given {there}. {fix}.") from err
