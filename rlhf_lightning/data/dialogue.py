r"""Dialogues in one text, as in Anthropic's hh-rlhf: `\n\nHuman: ... \n\nAssistant: ...` in turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_dialogue(value: object) -> bool:
    """Whether this is a text with a turn of the human and one of the assistant after it."""
    return isinstance(value, str) and -1 < f"\n\n{value}".find(HUMAN) < f"\n\n{value}".find(ASSISTANT)


def split_dialogues(dialogues: Sequence[str], *, where: str) -> tuple[str, list[str]]:
    r"""The prompt that some dialogues share, and how each goes on.

    Args:
        dialogues: one or more; they may differ in more than their last turn.
        where: they come from, for messages.

    Returns:
        The prompt, up to and with the last `\n\nAssistant:` that all of them have at the same place, and the
        rest of each.

    Raises:
        ValueError: there is no such place.

    Example:
        >>> split_dialogues(["\n\nHuman: Hi\n\nAssistant: Hello", "\n\nHuman: Hi\n\nAssistant: No"], where="")
        ('\n\nHuman: Hi\n\nAssistant:', [' Hello', ' No'])
    """
    first = dialogues[0]
    ends = [match.end() for match in re.finditer(ASSISTANT, first)]
    end = next((e for e in reversed(ends) if all(d.startswith(first[:e]) for d in dialogues)), None)
    if end is None:
        raise ValueError(
            f"{where}: {first[:60]!r} is not a dialogue, or shares no turn with its other answer: "
            rf"before an answer stands '\n\nHuman: ...\n\nAssistant:', the same in all. Remove the row."
        )
    return first[:end], [dialogue[end:] for dialogue in dialogues]


def as_messages(prompt: str, *, where: str) -> list[dict[str, str]]:
    r"""The turns of a dialogue as {role, content} messages; an empty last one, the assistant's, is left out.

    Turns of the same speaker in a row become one message.

    Raises:
        ValueError: the text begins with something else than a turn.

    Example:
        >>> as_messages("\n\nHuman: Hi\n\nAssistant:", where="")
        [{'role': 'user', 'content': 'Hi'}]
    """
    head, *parts = _TURN.split(prompt)
    if head.strip():
        raise ValueError(
            rf"{where}: a dialogue begins with '\n\nHuman:', this one with {head[:60]!r}. Remove the row."
        )
    turns = [(_ROLES[who], said.strip()) for who, said in zip(parts[::2], parts[1::2], strict=True)]
    if turns and turns[-1] == ("assistant", ""):
        turns.pop()
    return [
        {"role": role, "content": "\n\n".join(said for _, said in same)}
        for role, same in groupby(turns, key=lambda turn: turn[0])
    ]
