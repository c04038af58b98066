"""Prompts as texts: messages in the tokenizer's chat template, a plain text in the prompt template."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from jinja2 import TemplateError

from rlhf_lightning.data.record import are_messages, check_no_list, why_no_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.drafts import Draft
    from rlhf_lightning.data.format import Format


def prompt_messages(draft: Draft, form: Format) -> list[dict[str, str]] | None:
    """The messages of a row's prompt; None where it is a plain text.

    Raises:
        ValueError: the prompt is neither a text nor a list of messages, such a list as a text or without a
            template, or the field of prompts holds messages that end with an answer.
    """
    prompt, where = draft.prompt, draft.where
    if isinstance(prompt, str):
        check_no_list(prompt, draft.prompt_field, where=where)
        said = [{"role": "user", "content": in_prompt_template(prompt, form)}]
        return said if form.chat_template else None
    if not are_messages(prompt):
        why = why_no_messages(prompt) or "a prompt is a text or a list of {role, content} messages"
        raise ValueError(
            f"{where}: the field {draft.prompt_field!r} holds {repr(prompt)[:60]} "
            f"({type(prompt).__name__}); {why}."
        )
    if not form.chat_template:
        raise ValueError(
            f"{where}: the field {draft.prompt_field!r} holds a list of messages, which needs a chat "
            "template. Try --data.chat_template true."
        )
    asked = draft.prompt_field == form.prompt_field and not form.dialogue  # no answer was cut off
    if asked and prompt[-1]["role"] == "assistant":
        instead = "Remove that message or the row."
        if not draft.answers:
            imitated = f"--data completiondata --data.response_field {draft.prompt_field}"
            instead = f"Remove that message, or imitate it: {imitated}."
        raise ValueError(
            f"{where}: the last message in the field {draft.prompt_field!r} is the assistant's, and a prompt "
            f"ends before the answer. {instead}"
        )
    return list(prompt)


def render(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, form: Format, *, where: str
) -> str:
    """The text of messages in the chat template, up to the beginning of the model's turn.

    Raises:
        ValueError: the tokenizer's chat template refuses them.
    """
    try:
        return templated(messages, tokenizer, form, answered=False)
    except TemplateError as err:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"{where}: the tokenizer's chat template refuses messages of {roles} ({err}). Remove the row."
        ) from err


def templated(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, form: Format, *, answered: bool
) -> str:
    """The text of messages in the chat template; the beginning of the model's turn follows unless `answered`.

    Raises:
        TemplateError: the template refuses the messages.
        ValueError: the tokenizer has no template.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not answered, **form.template_options
        )
    except TypeError as err:  # the template adds a content, null beside tool_calls, to a text
        raise TemplateError(str(err)) from err
    return cast("str", rendered)


def in_prompt_template(prompt: object, form: Format) -> str:
    """A prompt in `prompt_template`."""
    return form.prompt_template.replace("{prompt}", str(prompt))
