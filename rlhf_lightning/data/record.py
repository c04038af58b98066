"""A row as it was read, with typed access to its fields; wrong fields are errors that name row and field."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from rlhf_lightning.data.rows import Row

_NOTHING = object()
_NAMES = {"response_field": ("completion", "messages", "output")}
"""Names of fields in data made for other systems, by option, that are spelt unlike those of this package."""
_LIST = re.compile(r"""\s*\[\s*\{(?=\s*(['"])(role|content)\1\s*:)(?=.*(['"])role\3\s*:).*\]\s*""", re.DOTALL)
"""A text that is a list of {role, content} messages, in JSON or as Python writes it."""
_SHOWN = 60
"""Characters of a wrong value that a message shows."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row, and where it comes from; reading a field that is missing or wrong raises a ValueError."""

    row: Row
    where: str
    """Where it comes from, for messages, such as `train.jsonl, row 3`."""

    def has(self, field: str) -> bool:
        """Whether the row has a field; `a.b` is the field b of the object that the field a holds."""
        return find(self.row, field, _NOTHING) is not _NOTHING

    def take(self, field: str, *, option: str, answers: Collection[str] = ()) -> object:
        """The value of a field, whatever it is.

        Args:
            field: its name, as `has` reads it.
            option: what the user set to that name.
            answers: fields that hold the answers, and so no prompt.

        Raises:
            ValueError: there is no such field; the message lists those there are.
        """
        if self.has(field):
            return find(self.row, field)
        guess = get_close_matches(field, self.row, n=1)
        guess = guess or [name for name in _NAMES.get(option, ()) if name in self.row]
        if not guess and option == "prompt_field":
            guess = [name for name in self.row if name not in answers][:1]
        later = re.search(r", row (?!1$)\d+$", self.where)  # rows before it have the field
        hint = "Correct or remove the row."
        if not later:
            if guess:
                hint = f"Try --data.{option} {guess[0]}."
            elif option == "prompt_field":
                hint = "Write the prompt into a field of its own."
            elif option == "response_field" and "text" in self.row:
                hint = "Whole texts are learned with --data textdata."
            elif self.row:
                hint = f"Type one of these as --data.{option}, or correct the row."
        known = ", ".join(self.row) or "none"
        raise ValueError(f"data.{option}={field}: {self.where} has no such field; it has: {known}. {hint}")

    def text(self, field: str, *, option: str, noun: str) -> str:
        """The text of a field.

        Raises:
            ValueError: the field is missing or holds something else; the message says "a <noun> is a text".
        """
        value = self.take(field, option=option)
        if not isinstance(value, str):
            raise self.wrong(field, f"{noun} is a text")
        return value

    def truth(self, field: str, *, option: str) -> bool:
        """The truth value of a field: true or false, 1 or 0.

        Raises:
            ValueError: the field is missing or holds something else.
        """
        value = self.take(field, option=option)
        if not isinstance(value, int) or value not in (0, 1):
            raise self.wrong(field, "this is true or false, or 1 or 0")
        return bool(value)

    def number(self, field: str, *, option: str) -> float:
        """The finite number of a field.

        Raises:
            ValueError: the field is missing or holds something else.
        """
        value = self.take(field, option=option)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(field, "this is a finite number")
        return float(value)

    def answer(self, field: str, *, option: str) -> tuple[list[dict[str, str]], str]:
        """The answer in a field: the messages before it, none where the field holds a text, and its text.

        Raises:
            ValueError: the field is missing, empty, or holds something else.
        """
        value = self.take(field, option=option)
        before: list[dict[str, str]] = []
        if are_messages(value) and value[-1]["role"] == "assistant":
            if value[-1].get("tool_calls"):
                raise ValueError(
                    f"{self.where}: the last message in the field {field!r} has tool_calls, and a "
                    "response is a text. Write the call into its content, as the chat template does, or "
                    "remove the row."
                )
            before, value = [*value[:-1]], value[-1]["content"]
        if not isinstance(value, str):
            raise self.wrong(
                field,
                why_no_messages(value)
                or "a response is a text, or a list of {role, content} messages, the assistant's last",
            )
        if not value:
            raise ValueError(f"{self.where}: the field {field!r} holds an empty response. Remove the row.")
        check_no_list(value, field, where=self.where)
        return before, value

    def wrong(self, field: str, wanted: str) -> ValueError:
        """The error for a field that does not hold what is `wanted`, such as "a prompt is a text"."""
        value = find(self.row, field)
        shown = repr(value)[:_SHOWN]
        return ValueError(
            f"{self.where}: the field {field!r} holds {shown} ({type(value).__name__}); {wanted}."
        )


def find(row: Row, field: str, default: object = None) -> object:
    """The value of a row's field, or `default`; `a.b` is a field so named, or the field b of object a."""
    if field in row:
        return row[field]
    value: object = row
    for part in field.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value


def are_messages(value: object) -> TypeGuard[Sequence[dict[str, str]]]:
    """Whether this is a list of {role, content} messages, at least one; see `content_of`."""
    return isinstance(value, list) and bool(value) and not why_no_messages(value)


def check_no_list(text: str, field: str, *, where: str) -> None:
    """Refuse messages that were written as a text, as tables and data frames hold them."""
    if _LIST.fullmatch(text):
        raise ValueError(
            f"{where}: the field {field!r} holds messages as a text, {text[:_SHOWN]!r}. Store them as a "
            "list: read the text with json.loads, or with ast.literal_eval where its quotes are Python's."
        )


def content_of(message: Mapping[str, str]) -> str:
    """The text of a message without blanks around it; empty where `tool_calls` stand alone."""
    return (message.get("content") or "").strip()


def why_no_messages(value: object) -> str:
    """What is wrong with the first item that is no message, by number and role; empty where nothing is."""
    for number, message in enumerate(value if isinstance(value, list) else (), start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"item {number} is not a {{role, content}} message"
        content = message.get("content")
        if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            kind = "null" if content is None else f"a {type(content).__name__}"
            return f"the content of message {number} ({message['role']}) is {kind}, and has to be a text"
    return ""
