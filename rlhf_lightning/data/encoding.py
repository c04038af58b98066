"""From drafts to token ids: prompts are rendered, all is tokenised, and what is too long is dropped."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple, cast

from jinja2 import TemplateError

from rlhf_lightning.data.batch import EncodedRows, pad_token_id, padded
from rlhf_lightning.data.record import are_messages, check_no_list, find, why_no_messages
from rlhf_lightning.data.row_tools import forms_of_rows
from rlhf_lightning.data.thoughts import Turn, turn_of
from rlhf_lightning.data.tokenizer import MARK, adds_space, end_tokens

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.batch import Extra
    from rlhf_lightning.data.drafts import Answer, Draft
    from rlhf_lightning.data.format import Format
    from rlhf_lightning.data.rows import Row

logger = logging.getLogger(__name__)

_CHUNK = 1024
_ANSWER = "an answer"


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
        render(said, tokenizer, own, where=draft.where) if said else _from_template(draft.prompt, own)
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


def prompt_messages(draft: Draft, form: Format) -> list[dict[str, str]] | None:
    """The messages of a row's prompt; None where it is a plain text.

    Raises:
        ValueError: the prompt is neither a text nor a list of messages, such a list as a text or without a
            template, or the field of prompts holds messages that end with an answer.
    """
    prompt, where = draft.prompt, draft.where
    if isinstance(prompt, str):
        check_no_list(prompt, draft.prompt_field, where=where)
        said = [{"role": "user", "content": _from_template(prompt, form)}]
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


def _from_template(prompt: object, form: Format) -> str:
    return form.prompt_template.replace("{prompt}", str(prompt))


def tokenize(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, special: bool
) -> Iterator[array[int]]:
    """Yield the token ids of every text.

    Args:
        texts: any number.
        tokenizer: of the model.
        special: with the tokens that the tokenizer puts around a text, such as a begin token; a text that
            has its begin token already is given no second one.

    Raises:
        ValueError: a text holds half a character, which JSON and Python allow, and no tokenizer.
    """
    doubled = array("i", [tokenizer.bos_token_id] * 2) if tokenizer.bos_token_id is not None else None
    for start in range(0, len(texts), _CHUNK):
        chunk = list(texts[start : start + _CHUNK])
        for text in chunk:
            _check_whole(text)
        for ids in tokenizer(chunk, add_special_tokens=special, verbose=False)["input_ids"]:
            found = array("i", ids)
            yield found[1:] if special and found[:2] == doubled else found


def _check_whole(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as err:
        around = text[max(err.start - 20, 0) : err.end + 20]
        raise ValueError(
            f"a text holds half a character ({text[err.start]!a}) without its other half, in {around!a}. "
            "Correct or remove its row."
        ) from err


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


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a response or a document.

    Raises:
        ValueError: the tokenizer has none.
    """
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end token (eos), which ends a response. Name "
            'one of its tokens in its tokenizer_config.json, such as "eos_token": "<|endoftext|>".'
        )
    return end


def turn_end(tokenizer: PreTrainedTokenizerBase, form: Format) -> int:
    """The token that ends a response: the chat template's after an answer if the model stops at it, else eos.

    A model stops at its tokenizer's end token and at those of its generation_config.json.

    Raises:
        ValueError: the tokenizer has no end token.
    """
    end = end_token(tokenizer)
    _, behind = _around_answer(tokenizer, form)
    if not behind:
        return end
    first = next(iter(tokenizer(behind, add_special_tokens=False)["input_ids"]), end)
    if first in end_tokens(tokenizer.name_or_path):
        return int(first)
    if first in tokenizer.added_tokens_decoder:
        logger.warning(
            "the chat template of %s ends an answer with %r, at which the model does not stop: responses end "
            "with %r. To end them as the template does, name the token in eos_token_id of the model's "
            "generation_config.json",
            tokenizer.name_or_path,
            tokenizer.decode([first]),
            tokenizer.eos_token,
        )
    return end


def _around_answer(tokenizer: PreTrainedTokenizerBase, form: Format) -> tuple[Turn, str]:
    """How an answer follows a rendered prompt, and what the chat template, if any, puts behind it."""
    if not form.chat_template:
        return Turn(), ""
    said = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        prompt = templated(said[:1], tokenizer, form, answered=False)
        rendered = templated(said, tokenizer, form, answered=True)
    except TemplateError:  # the template wants other messages, such as a system prompt
        return Turn(), ""
    before, _, behind = rendered.rpartition(_ANSWER)
    return turn_of(prompt, before), behind


def answer_tokens(
    answers: Sequence[Sequence[str]], tokenizer: PreTrainedTokenizerBase, form: Format
) -> Iterator[array[int]]:
    """Yield the token ids of every piece of answers, without a space that nobody wrote.

    Llama 2's tokenizer puts one before a text alone: pieces are tokenised behind a mark, which is cut off.
    Before an answer comes the space, or the empty thought, that the chat template puts there, and a thought
    that the prompt has begun is not begun again: as in what the model generates.

    Args:
        answers: the pieces of each, at least one.
        tokenizer: of the model.
        form: whether a chat template renders the prompts.
    """
    turn, _ = _around_answer(tokenizer, form)
    texts = [text for pieces in answers for text in (turn.after_prompt(*pieces), *pieces[1:])]
    if not adds_space(tokenizer):
        yield from tokenize(texts, tokenizer, special=False)
        return
    (mark,) = tokenize([MARK], tokenizer, special=False)
    behind = tokenize([MARK + text for text in texts], tokenizer, special=False)
    for text, ids in zip(texts, behind, strict=True):
        if ids[: len(mark)] == mark:
            yield ids[len(mark) :]
        else:
            yield from tokenize([text], tokenizer, special=False)


def _encode_answers(
    drafts: Sequence[Draft], tokenizer: PreTrainedTokenizerBase, form: Format, name: str
) -> list[list[_Response]]:
    """The responses to each prompt; empty lists where rows are prompts only."""
    pieces = [(draft.where, piece) for draft in drafts for answer in draft.answers for piece in answer.pieces]
    if not pieces:
        return [[] for _ in drafts]
    answers = [answer.pieces for draft in drafts for answer in draft.answers]
    _warn_of_thoughts(answers, tokenizer, form, name)
    ids = list(answer_tokens(answers, tokenizer, form))
    for (where, piece), tokens in zip(pieces, ids, strict=True):
        if piece and not tokens:  # the last answer of a dialogue may be empty
            raise ValueError(f"{where}: the response {piece!r} has no tokens. Remove the row.")
    end, rest = turn_end(tokenizer, form), iter(ids)
    return [
        [_join(answer, list(islice(rest, len(answer.pieces))), end) for answer in draft.answers]
        for draft in drafts
    ]


def _warn_of_thoughts(
    answers: Sequence[Sequence[str]], tokenizer: PreTrainedTokenizerBase, form: Format, name: str
) -> None:
    """Warn of answers without a thought where the prompt begins one, and of such with one where it ends one.

    Not where the template ends what it has begun.
    """
    turn, _ = _around_answer(tokenizer, form)
    plain = sum(not turn.has_thought("".join(pieces)) for pieces in answers)
    if turn.is_open and not turn.lead and plain:
        logger.warning(
            "%s: %d of %d answers have no %s, and the chat template of %s ends a prompt with %s: they are "
            "learned as thoughts that do not end. Begin them with %s%s, or set what turns thoughts off in "
            "data.chat_template_options",
            *(name, plain, len(answers), turn.closing, tokenizer.name_or_path),
            *(turn.tag, turn.tag, turn.closing),
        )
    if turn.ended and (thinking := sum(turn.ended in "".join(pieces) for pieces in answers)):
        logger.warning(
            "%s: %d of %d answers have a thought, up to %s, and the chat template of %s has ended one before "
            "the answer begins: they are learned as a second. Turn thoughts on in "
            "data.chat_template_options, or cut them out of the answers",
            *(name, thinking, len(answers), turn.ended, tokenizer.name_or_path),
        )


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
