"""What a loss or an estimator of the user's own reads, and was not given because it did not ask for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def reading(whose: str, **given: Mapping[str, Tensor]) -> Iterator[None]:
    """Within this context a KeyError says which name was looked up, what there is, and how to ask for it.

    Args:
        whose: class of the loss or the estimator.
        **given: what it is called with, by parameter.

    Raises:
        ValueError: a name was looked up that something of what was given lacks.
    """
    try:
        yield
    except KeyError as err:
        if not err.args or all(err.args[0] in names for names in given.values()):
            raise
        fix = _fix(err.args[0], outputs=sorted(given.get("outputs", ())), rows=given.get("rows", {}))
        there = " and ".join(f"{what} {sorted(names)}" for what, names in given.items())
        raise ValueError(f"{whose} reads {err.args[0]!r}, and is given {there}. {fix}.") from err


def _fix(name: str, *, outputs: Sequence[str], rows: Mapping[str, Tensor]) -> str:
    if name == "entropy" and "log_probs" in outputs:
        return "Let its `needs_entropy` be True"
    if name in rows:
        return f"Read rows[{name!r}], or give the loss to a role whose model makes {name!r}"
    return ", or read ".join(["Name the column in its `columns`", *(f"outputs[{n!r}]" for n in outputs)])
