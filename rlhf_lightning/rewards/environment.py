"""An environment: a function that answers an actor between its turns, given the texts so far.

actor: 12 * 7 = ?<end>  -->  function: "84<end>"  -->  actor: The answer is 84.<end>  -->  function: None
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

from rlhf_lightning.rewards.http import SCHEMES
from rlhf_lightning.rewards.registry import check_parameters, function_name, imported
from rlhf_lightning.rewards.score import PREFLIGHT_RESPONSE, items, tried_rows

Replies: TypeAlias = Sequence[str | None]
if TYPE_CHECKING:
    ReplyFunction: TypeAlias = Callable[
        [list[str], list[str], list[dict[str, object]]], Replies | Awaitable[Replies]
    ]
    Function: TypeAlias = str | ReplyFunction
else:  # what the command line takes
    Function = str


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Answers the actor, so that a response has several turns.

    Raises:
        ValueError: there is one turn only, or workers cannot import the function.
    """

    function: Function
    """Dotted path of `(prompts, responses, rows) -> replies`. Responses are the texts so far, special tokens
    included; a reply is the text that follows, never an empty one, or None where the response is complete."""
    turns: int = 4
    """Most turns of the actor."""
    columns: ClassVar[tuple[str, ...]] = ("rows",)
    """Columns that it reads beside the prompts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", function_name(self.function, "environment.function"))
        if self.turns < 2:
            raise ValueError(
                f"environment.turns={self.turns}: no turn of the actor follows a reply. Give at least 2, "
                "or no environment."
            )
        if self.name.startswith(SCHEMES):
            raise ValueError(
                f"environment.function={self.name!r}: it is a function, not a service. Write one that asks "
                "the service, `async def` if it waits, and give its dotted path."
            )

    @property
    def name(self) -> str:
        """The function's dotted path."""
        return function_name(self.function, "environment.function")

    def find(self) -> Callable[..., object]:
        """Import the function, which another node may lack.

        Raises:
            ValueError: there is no such function.
        """
        return imported(self.name, what=f"environment {self.name}")

    def replies(
        self, prompts: list[str], responses: list[str], rows: list[dict[str, object]]
    ) -> list[str | None]:
        """The reply to each response, None where it is complete; the function is given copies of the rows.

        Raises:
            ValueError: there is no such function, it failed, or did not return a text or None for each row.
        """
        whose = f"environment {self.name}"
        function = self.find()
        own = [deepcopy(row) for row in rows]  # it may write, and answers to one prompt share a row
        each = "one text for each response, or None where it is complete"
        found = items(function, prompts, responses, own, whose=whose, each=each)
        for reply in found:
            if why := _why_no_text(reply):
                raise ValueError(
                    f"{whose}: returned {repr(reply)[:60]}, which is not a text{why} Return a text, or None "
                    "where the response is complete."
                )
        return cast("list[str | None]", found)

    def try_out(self, rows: Sequence[dict[str, object]]) -> None:
        """Ask for replies to made-up responses of a few rows of each data source, `tried_rows`.

        Raises:
            ValueError: as `replies`, or the function does not take prompts, responses and rows.
        """
        whose = f"environment {self.name}"
        check_parameters(self.find(), what=whose, returns="replies")
        for picked in tried_rows(rows):
            prompts = [str(row.get("prompt", "")) for row in picked]
            self.replies(prompts, [PREFLIGHT_RESPONSE] * len(picked), picked)


def _why_no_text(reply: object) -> str:
    """The end of a sentence that says why a reply is no text; empty if it is one, or None."""
    if not isinstance(reply, str | None):
        return "."
    if reply == "":
        return ": it is empty."
    try:
        (reply or "").encode()
    except UnicodeEncodeError as err:  # half a character, which tokenizers refuse
        return f": {err}."
    return ""
