"""Who speaks between an actor's turns: a function of what has been said so far.

actor: 12 * 7 = ?<end>  -->  function: "84<end>"  -->  actor: The answer is 84.<end>  -->  function: None
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

from rlhf_lightning.rewards.http import SCHEMES
from rlhf_lightning.rewards.registry import check_parameters, dotted, imported
from rlhf_lightning.rewards.score import PREFLIGHT_RESPONSE, PREFLIGHT_ROWS, awaited

Replies: TypeAlias = Sequence[str | None]
if TYPE_CHECKING:
    Speaks: TypeAlias = Callable[
        [list[str], list[str], list[dict[str, object]]], Replies | Awaitable[Replies]
    ]
    Function: TypeAlias = str | Speaks
else:  # what the command line takes
    Function = str


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What answers the actor, so that a response has several turns.

    Raises:
        ValueError: there is one turn only, or workers cannot import the function.
    """

    function: Function
    """Dotted path of `(prompts, responses, rows) -> replies`: what is said so far, special tokens included,
    to a text that comes next, or None where the response is whole."""
    turns: int = 4
    """Times that the actor speaks at most."""
    columns: ClassVar[tuple[str, ...]] = ("rows",)
    """What it reads beside prompts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", dotted(self.function, "environment.function"))
        if self.turns < 2:
            raise ValueError(
                f"environment.turns={self.turns}: nobody is answered. Give at least 2, or no environment."
            )
        if self.name.startswith(SCHEMES):
            raise ValueError(
                f"environment.function={self.name!r}: it is a function, not a service. Write one that asks "
                "the service, `async def` if it waits, and give its dotted path."
            )

    @property
    def name(self) -> str:
        """The dotted path."""
        return dotted(self.function, "environment.function")

    def replies(
        self, prompts: list[str], responses: list[str], rows: list[dict[str, object]]
    ) -> list[str | None]:
        """What comes after each response, None where nothing does.

        Raises:
            ValueError: there is no such function, it failed, or returned something else.
        """
        whose, speaks = f"environment {self.name}", imported(self.name, what=f"environment {self.name}")
        try:
            said = speaks(prompts, responses, rows)
            found = list(cast(Replies, awaited(said) if isinstance(said, Awaitable) else said))
        except (Exception, SystemExit) as err:
            raise ValueError(
                f"{whose}: {type(err).__name__} over {len(rows)} rows, the first with the prompt "
                f"{prompts[0][:60]!r}: {err}"
            ) from err
        if len(found) != len(rows):
            raise ValueError(
                f"{whose}: returned {len(found)} replies for {len(rows)} rows. Return one for each, None "
                "where the response is whole."
            )
        for reply in found:
            if why := _no_text(reply):
                raise ValueError(
                    f"{whose}: returned {repr(reply)[:60]}, which is no text{why} Return a text, or None "
                    "where the response is whole."
                )
        return found

    def try_out(self, rows: Sequence[dict[str, object]]) -> None:
        """Ask for replies to made-up responses of a few rows.

        Raises:
            ValueError: as `replies`, or the function takes something else.
        """
        whose = f"environment {self.name}"
        check_parameters(imported(self.name, what=whose), what=whose, returns="replies")
        picked = deepcopy(list(rows[:PREFLIGHT_ROWS]))  # a function may write
        prompts = [str(row.get("prompt", "")) for row in picked]
        if picked:
            self.replies(prompts, [PREFLIGHT_RESPONSE] * len(picked), picked)


def _no_text(reply: object) -> str:
    """Why a reply cannot be said; empty where it can, or is None."""
    if not isinstance(reply, str | None):
        return "."
    try:
        (reply or "").encode()
    except UnicodeEncodeError as err:  # half a character, which tokenizers refuse
        return f": {err}."
    return ""
