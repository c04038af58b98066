"""What a chat template writes of a thought before an answer, and so how an answer goes on behind a prompt.

Qwen3            a prompt ends with the turn's beginning; an answer without a thought is given an empty one
Qwen3, thinking  a prompt ends with <think>, too; an answer without a thought closes it
DeepSeek-R1      a prompt ends with <think>, which the conversation with an answer does not have
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = r"[\w:]*(?:think|thought|reason)\w*"  # of the tags around a thought
_CLOSED = re.compile(rf"(</{_NAME}>|\[/{_NAME}\])\s*$", re.IGNORECASE)
_TAG = re.compile(rf"\s*(<{_NAME}>|\[{_NAME}\])\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Turn:
    """The beginning of an answer's turn, as a chat template writes it."""

    lead: str = ""
    """What stands between a rendered prompt and an answer without a thought."""
    tag: str = ""
    """What begins a thought; empty where the template knows none."""
    white: str = ""
    """White space at the end of rendered prompts."""
    is_open: bool = False
    """Whether the tag stands before it there."""

    @property
    def closing(self) -> str:
        """What ends a thought."""
        return f"{self.tag[:1]}/{self.tag[1:]}"

    def has_thought(self, answer: str) -> bool:
        """Whether an answer is written with a thought of its own, be it after the tag."""
        return bool(self.tag) and (answer.lstrip().startswith(self.tag) or self.closing in answer)

    def after_prompt(self, answer: str) -> str:
        """The text of an answer that follows a rendered prompt."""
        begun = answer.lstrip()
        if self.has_thought(answer):
            if not (self.is_open and begun.startswith(self.tag)):
                return answer
            return begun.removeprefix(self.tag).removeprefix(self.white)
        if self.lead.isspace():
            return answer if answer[:1].isspace() else self.lead + answer
        return self.lead + answer if _CLOSED.search(self.lead) else answer


def turn_of(prompt: str, before: str) -> Turn:
    """What a template does before an answer.

    Args:
        prompt: a rendered prompt.
        before: the rendered conversation with an answer, up to the answer.
    """
    lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
    if closed := _CLOSED.search(lead):
        tag = closed[1].replace("/", "", 1)
    else:
        begun = _TAG.fullmatch(prompt.removeprefix(before)) if prompt.startswith(before) else None
        tag = begun[1] if begun else ""
    white = prompt[len(prompt.rstrip()) :]
    return Turn(lead, tag, white, bool(tag) and prompt.rstrip().endswith(tag))
