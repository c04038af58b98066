"""How much of a call its process has, for what needs all ranks, or all rows, of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Scope = Literal["all", "part", "some"]
"""A call of all ranks and all rows; of all ranks, with one part of a batch in parts; of some ranks alone."""
_scope: ContextVar[Scope] = ContextVar("scope", default="all")


@contextmanager
def serving(scope: Scope) -> Iterator[None]:
    """Within this context, the process serves a call of this scope."""
    before = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(before)


def need_all_rows(what: str) -> None:
    """Refuse what adds up over all rows in a call that has one part of them."""
    if _scope.get() == "part":
        raise ValueError(
            f"{what}: the answers come in parts here, and this call has one of them. Register the method "
            "with transfer=BROADCAST, by which each rank has all rows and adds up by itself, or do it in "
            "`step`."
        )


def need_all_ranks(what: str) -> None:
    """Refuse what all ranks of a model do together in a call of some of them: it would wait for ever."""
    if _scope.get() == "some":
        raise ValueError(
            f"{what}: the ranks of the model compute together, and this call is not of all of them. Register "
            "the method with transfer=DP, or ONE_TO_ALL where it takes no rows."
        )
