"""Given answers as token ids, as they follow a rendered prompt, and the token that ends them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from rlhf_lightning.data.rendering import templated
from rlhf_lightning.data.thoughts import Turn, turn_of
from rlhf_lightning.data.tokenizer import MARK, adds_space, end_token, end_tokens, tokenize

if TYPE_CHECKING:
    from array import array

    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.format import Format

logger = logging.getLogger(__name__)

_ANSWER = "an answer"


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


def warn_of_thoughts(
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
