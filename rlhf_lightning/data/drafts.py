"""Drafts: what a row says, as text: its prompt and the answers to it, before they are tokenised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlhf_lightning.data.dialogue import as_messages, is_dialogue, split_dialogues
from rlhf_lightning.data.record import are_messages, content_of

if TYPE_CHECKING:
    from rlhf_lightning.data.format import Format
    from rlhf_lightning.data.record import Record
    from rlhf_lightning.data.rows import Row


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response to a prompt."""

    pieces: tuple[str, ...]
    """Texts whose tokens are joined, each tokenised by itself: the steps of a solution; mostly just one."""
    labels: tuple[float, ...] = ()
    """A label for each piece, for the columns `step_labels` and `step_mask`: at its last token, that of the
    last piece at the end token; empty for none."""
    values: Mapping[str, bool | float] = field(default_factory=dict)
    """Values of extra columns of the batch, by name."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """One row: a prompt, and the answers to it."""

    row: Row
    prompt: object
    """A text, or a list of {role, content} messages."""
    prompt_field: str
    """Field that held it, for messages."""
    where: str
    """Where the row comes from, for messages, such as `train.jsonl, row 3`."""
    answers: tuple[Answer, ...] = ()
    """None, one, or the two of a pair."""

    def with_values(self, *values: Mapping[str, bool | float]) -> Draft:
        """The draft with values of extra columns, a mapping for each answer."""
        changed = [replace(answer, values=own) for answer, own in zip(self.answers, values, strict=True)]
        return replace(self, answers=tuple(changed))

    def for_each_answer(self) -> list[Draft]:
        """A draft for each text that the assistant says, after the messages before it; this one is the last.

        Messages with `tool_calls` are no texts, and before a greeting no user has asked for it.
        """
        said = self.prompt if isinstance(self.prompt, list) else []
        earlier, asked = [], False
        for at, message in enumerate(said):
            is_text = content_of(message) and not message.get("tool_calls")
            if asked and is_text and message["role"] == "assistant":
                answer = Answer(pieces=(message["content"],))
                earlier.append(replace(self, prompt=said[:at], answers=(answer,)))
            asked = asked or message["role"] == "user"
        return [*earlier, self]


def read_draft(record: Record, form: Format, fields: Mapping[str, str]) -> Draft:
    """Find the prompt of a row and its answers.

    An answer is a text, and the prompt a field of its own; or an answer is a conversation or a dialogue that
    brings its prompt along: what comes before its last turn, with the messages of that field before it.

    Args:
        record: the row.
        form: where the prompt is.
        fields: of the answers, by the option that names each; empty for a prompt alone.

    Raises:
        ValueError: a field is missing or holds something else, two answers bring different prompts along, or
            a text in the field of prompts is in neither.
    """
    values = [record.take(name, option=option) for option, name in fields.items()]
    apart = record.has(form.prompt_field) and form.prompt_field not in fields.values()
    detected = values and not apart and all(map(is_dialogue, values))
    if form.dialogue or detected:
        return _from_dialogues(record, form, fields)
    found = {name: record.answer(name, option=option) for option, name in fields.items()}
    first = next(iter(fields.values()), "")
    before = found[first][0] if found else []
    other = next((name for name, (turns, _) in found.items() if turns != before), None)
    if other is not None:
        raise ValueError(
            f"{record.where}: the fields {first!r} and {other!r} hold different messages before their last, "
            "and both answer one prompt. Correct or remove the row."
        )
    return Draft(
        row=record.row,
        prompt=_asked(record, form, found),
        prompt_field=first if before else form.prompt_field,
        where=record.where,
        answers=tuple(Answer(pieces=(text,)) for _, text in found.values()),
    )


def _asked(record: Record, form: Format, found: Mapping[str, tuple[list[dict[str, str]], str]]) -> object:
    """The prompt of a row whose answers have messages before them; what both hold stands once.

    Args:
        record: the row.
        form: where the prompt is.
        found: messages before the answer, the same in all, and its text, by field; empty for no answers.

    Raises:
        ValueError: there is no prompt, or one that does not go together with the messages.
    """
    answer, before = next(((name, turns) for name, (turns, _) in found.items()), ("", []))
    if before and (form.prompt_field in found or not record.has(form.prompt_field)):
        return before
    prompt = record.take(form.prompt_field, option="prompt_field", answers=found)
    if form.prompt_field in found and isinstance(prompt, str):
        raise ValueError(
            f"{record.where}: the field {form.prompt_field!r} holds a text, and is named for the prompt and "
            "for an answer, which would be the same. Name another field for one of them; --data textdata "
            "imitates the whole of a text."
        )
    if not before or not prompt:
        return before or prompt
    if are_messages(prompt):
        return _together(prompt, before, [answer for _, answer in found.values()])
    said = [content_of(message) for message in before]
    if not isinstance(prompt, str) or prompt.strip() not in said:
        raise ValueError(
            f"{record.where}: the field {form.prompt_field!r} holds {str(prompt)[:60]!r}, and none of the "
            f"messages before the answer in {answer!r} says so. Give the prompt as messages whose contents "
            "are texts, or remove the field or the row."
        )
    return before


def _together(
    prompt: Sequence[dict[str, str]], before: list[dict[str, str]], answers: Sequence[str]
) -> list[dict[str, str]]:
    """Messages of a prompt, and those before the answers that it does not end with.

    A prompt that ends with these and an answer is the whole conversation.
    """
    asked, begun, ends = (
        [(m["role"], content_of(m), m.get("tool_calls")) for m in part]
        for part in (prompt, before, [{"role": "assistant", "content": answer} for answer in answers])
    )
    if asked[-1] in ends and asked[-1 - len(begun) : -1] == begun:
        return [*prompt[:-1]]
    if any(begun[n : n + len(asked)] == asked for n in range(len(begun))):
        return before
    new = next(n for n in range(len(asked) + 1) if begun[: len(asked) - n] == asked[n:])
    return [*prompt[:new], *before]


def _from_dialogues(record: Record, form: Format, fields: Mapping[str, str]) -> Draft:
    """With a chat template the turns become messages, and an answer loses the blanks around it."""
    sources = fields or {"prompt_field": form.prompt_field}
    texts = [record.text(name, option=option, noun="a dialogue") for option, name in sources.items()]
    prompt, rests = split_dialogues(texts, where=record.where)
    answers = [rest.strip() if form.chat_template else rest for rest in rests] if fields else []
    return Draft(
        row=record.row,
        prompt=as_messages(prompt, where=record.where) if form.chat_template else prompt,
        prompt_field=next(iter(sources.values())),
        where=record.where,
        answers=tuple(Answer(pieces=(answer,)) for answer in answers),
    )
