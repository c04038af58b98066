"""From drafts to token ids: prompts are rendered, all is tokenised, and what is too long is dropped."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

from rlhf_lightning.data.answers import answer_tokens, turn_end, warn_of_thoughts
from rlhf_lightning.data.batch import EncodedRows, pad_token_id, padded
from rlhf_lightning.data.record import find
from rlhf_lightning.data.rendering import in_prompt_template, prompt_messages, render
from rlhf_lightning.data.row_tools import forms_of_rows
from rlhf_lightning.data.tokenizer import tokenize

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.batch import Extra
    from rlhf_lightning.data.drafts import Answer, Draft
    from rlhf_lightning.data.format import Format
    from rlhf_lightning.data.rows import Row

logger = logging.getLogger(__name__)


class _Response(NamedTuple):
    ids: array[int]
    extras: dict[str, Extra]


def encode_drafts(
    drafts: Sequence[Draft],
    tokenizer: PreTrainedTokenizerBase,
    form: Format,
    *,
    name: str,
    key_offset: int = 0,
) -> EncodedRows:
    """Encode all rows, drop those that are too long, and log how many.

    A row with two answers becomes two neighbouring rows, or none: also if the answers are the same.

    Args:
        drafts: one for each row, in order.
        tokenizer: of the model.
        form: how a row becomes a prompt.
        name: where the rows come from, for messages.
        key_offset: added to the keys to make the row ids.

    Raises:
        ValueError: a prompt is neither a text nor messages, what should be tools is not, a text has no
            tokens, or no row is short enough.
    """
    form.check_template(tokenizer)
    messages = [prompt_messages(draft, form) for draft in drafts]
    forms = forms_of_rows(drafts, tokenizer, form, name=name)
    texts = [
        render(said, tokenizer, own, where=draft.where) if said else in_prompt_template(draft.prompt, own)
        for draft, said, own in zip(drafts, messages, forms, strict=True)
    ]
    prompts = list(tokenize(texts, tokenizer, special=not form.chat_template))
    for draft, text, prompt in zip(drafts, texts, prompts, strict=True):
        if not prompt:
            raise ValueError(f"{draft.where}: the prompt {text!r} has no tokens. Remove the row.")
    responses = _encode_answers(drafts, tokenizer, form, name)
    kept = _fitting(prompts, responses, form, name)
    rows = {i: _with_prompt(drafts[i].row, texts[i], messages[i], form) for i in kept}
    places = [index for index in kept for _ in range(max(1, len(responses[index])))]
    flat = [response for index in kept for response in responses[index]]
    columns = flat[0].extras if flat else ()
    return EncodedRows(
        rows=[rows[index] for index in places],
        prompts=[prompts[index] for index in places],
        responses=[response.ids for response in flat] if flat else None,
        extras={column: [response.extras[column] for response in flat] for column in columns},
        group=form.group,
        key_offset=key_offset,
    )


def prompt_columns(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, special: bool = True
) -> dict[str, Tensor]:
    """Columns with which `generate_sequences` reads texts as prompts, such as questions to a judge.

    Args:
        texts: B of them.
        tokenizer: of the model that is to answer.
        special: as in `tokenize`; False for texts that a chat template has rendered, which contain them.

    Returns:
        `prompt_ids` [B, P] int64, padded on the left, and `prompt_mask` [B, P] bool.

    Raises:
        ValueError: a text has no tokens.
    """
    found = list(tokenize(texts, tokenizer, special=special))
    if empty := [text for text, ids in zip(texts, found, strict=True) if not ids]:
        raise ValueError(
            f"prompt_columns: {len(empty)} of {len(texts)} texts, such as {empty[0]!r}, have no tokens."
        )
    ids, mask = padded(found, pad_token_id(tokenizer), left=True)
    return {"prompt_ids": ids, "prompt_mask": mask}


def _encode_answers(
    drafts: Sequence[Draft], tokenizer: PreTrainedTokenizerBase, form: Format, name: str
) -> list[list[_Response]]:
    """The responses to each prompt; empty lists where rows are prompts only."""
    pieces = [(draft.where, piece) for draft in drafts for answer in draft.answers for piece in answer.pieces]
    if not pieces:
        return [[] for _ in drafts]
    answers = [answer.pieces for draft in drafts for answer in draft.answers]
    warn_of_thoughts(answers, tokenizer, form, name)
    ids = list(answer_tokens(answers, tokenizer, form))
    for (where, piece), tokens in zip(pieces, ids, strict=True):
        if piece and not tokens:  # the last answer of a dialogue may be empty
            raise ValueError(f"{where}: the response {piece!r} has no tokens. Remove the row.")
    end, rest = turn_end(tokenizer, form), iter(ids)
    return [
        [_join(answer, list(islice(rest, len(answer.pieces))), end) for answer in draft.answers]
        for draft in drafts
    ]


def _join(answer: Answer, pieces: Sequence[array[int]], end: int) -> _Response:
    ids = array("i", [token for piece in pieces for token in piece])
    if not ids or ids[-1] != end:  # a text may hold it
        ids.append(end)
    extras: dict[str, Extra] = dict(answer.values)
    if answer.labels:
        mask, labels = array("b", bytes(len(ids))), array("f", bytes(4 * len(ids)))
        ends = list(accumulate(map(len, pieces)))
        ends[-1] = len(ids)  # with the end token
        for behind, label in zip(ends, answer.labels, strict=True):
            mask[behind - 1], labels[behind - 1] = True, label
        extras |= {"step_mask": mask, "step_labels": labels}
    return _Response(ids, extras)


def _fitting(
    prompts: Sequence[array[int]], responses: Sequence[Sequence[_Response]], form: Format, name: str
) -> list[int]:
    """Indices of the rows that are short enough, and whose two answers, if they have two, differ."""
    limit = form.max_response_tokens
    long_prompts = {i for i, prompt in enumerate(prompts) if len(prompt) > form.max_prompt_tokens}
    long_responses = {i for i, own in enumerate(responses) if any(len(r.ids) > limit for r in own)}
    same = {i for i, own in enumerate(responses) if len(own) == 2 and own[0].ids == own[1].ids}
    dropped = long_prompts | long_responses | same
    if not dropped:
        return list(range(len(prompts)))
    said = f"{len(long_prompts)} with a prompt longer than data.max_prompt_tokens={form.max_prompt_tokens}"
    if any(responses):
        said += f", {len(long_responses)} with a response longer than data.max_response_tokens={limit}"
    if any(len(own) == 2 for own in responses):
        said += f", {len(same)} with the same response twice"
    if len(dropped) == len(prompts):
        shortest = f"the shortest prompt has {min(map(len, prompts))} tokens"
        advice = "Raise the limit." if len(same) < len(dropped) else "Give pairs that differ."
        raise ValueError(f"{name}: none of the {len(prompts)} rows fits ({said}; {shortest}). {advice}")
    logger.warning("%s: %d of %d rows dropped (%s)", name, len(dropped), len(prompts), said)
    return [index for index in range(len(prompts)) if index not in dropped]


def _with_prompt(row: Row, text: str, messages: list[dict[str, str]] | None, form: Format) -> Row:
    source = find(row, form.data_source_field)
    rendered = {"prompt_messages": messages} if messages else {}
    named = {"prompt": text, "data_source": form.data_source if source is None else str(source)}
    return {**row, **named, **rendered}
