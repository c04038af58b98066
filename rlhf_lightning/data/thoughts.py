"""What a chat template writes of a thought before an answer, and so how an answer goes on behind a prompt.

Qwen3            a prompt ends with the turn's beginning; an answer without a thought is given an empty one
Qwen3, thinking  a prompt ends with <think>, too; an answer without a thought closes it
DeepSeek-R1      a prompt ends with <think>, which the conversation with an answer does not have
GLM-4.7          a prompt ends with <think>, in whose place the conversation with an answer has </think>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = r"[\w:]*(?:think|thought|reason)\w*"  # of the tags around a thought
_CLOSED = re.compile(rf"(</{_NAME}>|\[/{_NAME}\])\s*$", re.IGNORECASE)
_BEGUN = re.compile(rf"\s*(<{_NAME}>|\[{_NAME}\])\s*$", re.IGNORECASE)


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
    ended: str = ""
    """What ends a thought at the end of rendered prompts, where thoughts are turned off."""

    @property
    def closing(self) -> str:
        """What ends a thought."""
        return f"{self.tag[:1]}/{self.tag[1:]}"

    def has_thought(self, answer: str) -> bool:
        """Whether an answer is written with a thought of its own, be it after the tag."""
        return bool(self.tag) and (answer.lstrip().startswith(self.tag) or self.closing in answer)

    def after_prompt(self, *pieces: str) -> str:
        """The first of an answer's pieces, as it follows a rendered prompt."""
        begun = pieces[0].lstrip()
        if self.has_thought("".join(pieces)):
            tagged = begun.startswith(self.tag)
            if self.is_open:
                return begun.removeprefix(self.tag).removeprefix(self.white) if tagged else pieces[0]
            head, _, empty = self.lead.partition(self.tag)
            half = len(empty.partition(self.closing)[0]) // 2  # of the white space of an empty thought
            return head + (begun if tagged else self.tag + empty[:half] + begun)
        if self.lead.isspace():
            return pieces[0] if pieces[0][:1].isspace() else self.lead + pieces[0]
        return self.lead + pieces[0] if _CLOSED.search(self.lead) else pieces[0]


def turn_of(prompt: str, before: str) -> Turn:
    """What a template does before an answer.

    Args:
        prompt: a rendered prompt.
        before: the rendered conversation with an answer, up to the answer.
    """
    begun = _BEGUN.search(prompt)
    lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
    if begun and not lead and before.startswith(head := prompt[: begun.start()]):
        rest = before.removeprefix(head).rpartition(begun[1])[2]
        lead = rest if _CLOSED.search(rest) else ""
    closed = _CLOSED.search(lead)
    tag = begun[1] if begun else closed[1].replace("/", "", 1) if closed else ""
    ended = _CLOSED.search(prompt)
    return Turn(lead, tag, prompt[len(prompt.rstrip()) :], bool(begun), ended[1] if ended else "")
