"""Options of a data module that say how a row becomes a prompt and a response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESERVED = ("messages", "add_generation_prompt", "conversation", "tokenize")
"""Variables of a chat template that are set here, and so cannot be options."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a row becomes a prompt, and a response where there is one."""

    prompt_field: str = "prompt"
    """Field that holds the prompt: a text, or a list of {role, content} messages."""
    prompt_template: str = "{prompt}"
    """Text around a prompt."""
    chat_template: bool = False
    """Whether the prompt is rendered with the tokenizer's chat template."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    dialogue: bool = False
    """Whether fields hold whole dialogues: the last answer is the response, all before it the prompt."""
    max_prompt_tokens: int = 512
    """Rows with longer prompts are dropped."""
    response_field: str | None = None
    """Field that holds the response; None where the rows are prompts only."""
    max_response_tokens: int = 512
    """Rows with longer responses are dropped; the end token counts."""
    data_source_field: str = "data_source"
    """Field that names the data source."""
    data_source: str = ""
    """Data source of the rows that have no such field."""
    group: int = 1
    """Rows of a batch that one raw row becomes: 2 for a pair."""

    def check_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a chat template that is not there, and variables that it lacks or that nothing reads."""
        if self.chat_template and not tokenizer.chat_template:
            raise ValueError(
                f"data.chat_template=true: the tokenizer of {tokenizer.name_or_path} has no chat template. "
                "Leave it out, or put one beside the tokenizer as chat_template.jinja."
            )
        if self.template_options and not self.chat_template:
            raise ValueError(
                f"data.chat_template_options={dict(self.template_options)}: they are for the chat template, "
                "which is not used. Add --data.chat_template true."
            )
        for name in self.template_options:
            if name in _RESERVED or name not in str(tokenizer.chat_template):
                raise ValueError(
                    f"data.chat_template_options: the chat template of {tokenizer.name_or_path} has no "
                    f"{name!r} that could be set. Type a variable that stands in it."
                )


def check_prompt_template(template: str) -> None:
    """Refuse a text around prompts that leaves them out."""
    if "{prompt}" not in template:
        raise ValueError(
            f"data.prompt_template={template!r}: it has no {{prompt}}, so all prompts would be the same. "
            "Put {prompt} where the row's prompt goes."
        )
