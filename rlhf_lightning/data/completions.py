"""Prompts with the responses to imitate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_lightning.data.format import Format
from rlhf_lightning.data.prompts import PromptData

if TYPE_CHECKING:
    from rlhf_lightning.data.drafts import Draft
    from rlhf_lightning.data.record import Record


@dataclass(kw_only=True, eq=False, repr=False)
class CompletionData(PromptData):
    """Prompts and responses for supervised fine-tuning; the end token is added to every response."""

    response_field: str = "response"
    """Field that holds the response: a text, or a conversation whose last answer it is and whose rest is the
    prompt (a list of {role, content} messages, or a dialogue "Human: ... Assistant: ..." in one text)."""
    max_response_tokens: int = 512
    """Rows with longer responses are counted and dropped; the end token counts."""
    every_answer: bool = False
    """Learn every answer of a conversation, not only its last: each is a row, with the messages before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every_answer and not self.chat_template:
            raise ValueError(
                f"{self.typed}.every_answer=true: answers are told apart in messages, which a chat template "
                f"renders. Add --{self.typed}.chat_template true, or leave {self.typed}.every_answer out."
            )

    def format(self) -> Format:
        """Return how a row becomes a prompt and a response."""
        return replace(
            super().format(), response_field=self.response_field, max_response_tokens=self.max_response_tokens
        )

    def drafts(self, record: Record, form: Format) -> list[Draft]:
        """Return one draft, or one for each answer of a conversation."""
        draft = self.draft(record, form)
        return draft.for_each_answer() if self.every_answer else [draft]
