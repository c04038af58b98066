"""From rows to token ids: rendering, tokenising, and dropping what is too long."""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rlhf_lightning.data.batch import EncodedRows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.rows import Row

logger = logging.getLogger(__name__)

_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a row becomes a prompt, and a response where there is one."""

    prompt_field: str = "prompt"
    """Field that holds the prompt: a text, or a list of {role, content} messages."""
    prompt_template: str = "{prompt}"
    """Text around a prompt."""
    chat_template: bool = False
    """Render the prompt with the tokenizer's chat template."""
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


def encode_rows(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, form: Format, *, name: str, key_offset: int = 0
) -> EncodedRows:
    """Encode all rows, drop the over-long ones and say how many.

    Args:
        rows: as they were read.
        tokenizer: of the model.
        form: how a row becomes a prompt.
        name: where the rows come from, for messages.
        key_offset: added to the keys to make the row ids.

    Raises:
        ValueError: a row lacks a field or holds something else than text, or none is short enough.
    """
    texts = [
        render_prompt(row, tokenizer, form, where=f"{name}, row {n}") for n, row in enumerate(rows, start=1)
    ]
    prompts = list(_tokenize(texts, tokenizer, special=not form.chat_template))
    empty = next((n for n, prompt in enumerate(prompts, start=1) if not prompt), None)
    if empty is not None:
        raise ValueError(
            f"{name}, row {empty}: the prompt {texts[empty - 1]!r} has no tokens. Remove the row."
        )
    responses = _encode_responses(rows, tokenizer, form, name)
    kept = _short_enough(prompts, responses, form, name)
    return EncodedRows(
        rows=[_with_prompt(rows[index], texts[index], form) for index in kept],
        prompts=[prompts[index] for index in kept],
        responses=None if responses is None else [responses[index] for index in kept],
        key_offset=key_offset,
    )


def render_prompt(row: Row, tokenizer: PreTrainedTokenizerBase, form: Format, *, where: str) -> str:
    """Return the text of a row's prompt, as the model reads it.

    Raises:
        ValueError: the prompt is missing, or neither a text nor a list of messages.
    """
    prompt = _field(row, form.prompt_field, "prompt_field", where)
    if isinstance(prompt, str):
        text = form.prompt_template.replace("{prompt}", prompt)
        messages: object = [{"role": "user", "content": text}]
        if not form.chat_template:
            return text
    else:
        messages = prompt
    if not _are_messages(messages):
        raise ValueError(
            f"{where}: the field {form.prompt_field!r} holds {str(prompt)[:60]!r} ({type(prompt).__name__}); "
            "a prompt is a text or a list of {role, content} messages."
        )
    if not form.chat_template:
        raise ValueError(
            f"{where}: the field {form.prompt_field!r} holds a list of messages, which needs a chat "
            "template. Try --data.chat_template true."
        )
    rendered = tokenizer.apply_chat_template(
        cast("list[dict[str, str]]", messages), tokenize=False, add_generation_prompt=True
    )
    return cast("str", rendered)


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in value
        )
    )


def _field(row: Row, field: str, option: str, where: str) -> object:
    if field not in row:
        known = ", ".join(row) or "none"
        hint = f" Try --data.{option} {next(iter(row))}." if row else ""
        raise ValueError(f"data.{option}={field}: {where} has no such field; it has: {known}.{hint}")
    return row[field]


def _encode_responses(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, form: Format, name: str
) -> list[array[int]] | None:
    if form.response_field is None:
        return None
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end token (eos), which ends a response."
        )
    texts = []
    for number, row in enumerate(rows, start=1):
        text = _field(row, form.response_field, "response_field", f"{name}, row {number}")
        if not isinstance(text, str):
            raise ValueError(
                f"{name}, row {number}: the field {form.response_field!r} holds a {type(text).__name__}; "
                "a response is a text."
            )
        texts.append(text)
    return [array("i", [*ids, end]) for ids in _tokenize(texts, tokenizer, special=False)]


def _tokenize(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, special: bool
) -> Iterator[array[int]]:
    for start in range(0, len(texts), _CHUNK):
        chunk = list(texts[start : start + _CHUNK])
        for ids in tokenizer(chunk, add_special_tokens=special, verbose=False)["input_ids"]:
            yield array("i", ids)


def _short_enough(
    prompts: list[array[int]], responses: list[array[int]] | None, form: Format, name: str
) -> list[int]:
    long_prompts = {index for index, prompt in enumerate(prompts) if len(prompt) > form.max_prompt_tokens}
    lengths = [] if responses is None else [len(response) for response in responses]
    long_responses = {index for index, length in enumerate(lengths) if length > form.max_response_tokens}
    dropped = long_prompts | long_responses
    if not dropped:
        return list(range(len(prompts)))
    said = f"{len(long_prompts)} with a prompt longer than data.max_prompt_tokens={form.max_prompt_tokens}"
    if responses is not None:
        limit = form.max_response_tokens
        said += f", {len(long_responses)} with a response longer than data.max_response_tokens={limit}"
    if len(dropped) == len(prompts):
        shortest = f"the shortest prompt has {min(map(len, prompts))} tokens"
        raise ValueError(
            f"{name}: none of the {len(prompts)} rows fits ({said}; {shortest}). Raise the limit."
        )
    logger.warning("%s: %d of %d rows dropped (%s)", name, len(dropped), len(prompts), said)
    return [index for index in range(len(prompts)) if index not in dropped]


def _with_prompt(row: Row, text: str, form: Format) -> Row:
    source = row.get(form.data_source_field)
    return {**row, "prompt": text, "data_source": form.data_source if source is None else str(source)}
