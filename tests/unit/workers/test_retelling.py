"""What a judge with a tokenizer of its own is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data.drafts import Answer, Draft
from rlhf_lightning.data.encoding import encode_drafts
from rlhf_lightning.data.format import Format
from rlhf_lightning.data.tokenizer import load_tokenizer
from rlhf_lightning.workers.retelling import Retelling
from tests.embedded_model import build_byte_tokenizer
from tests.unit.data.conftest import write_spacing

END = 258
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]


def told(
    row: dict[str, object], response: str | None, *, positions: int | None = None, ended: bool = True
) -> list[int]:
    """The tokens of one row."""
    retelling = Retelling(tokenizer=build_byte_tokenizer(), positions=positions)
    rows = retelling.rows([row, {"prompt": "a longer one"}], [response, "x"], ended=[ended, True])
    assert rows["response_ids"].shape == (2, 1)
    assert rows["response_mask"][1]
    prompt = rows["prompt_ids"][0][rows["prompt_mask"][0]].tolist()
    return [*prompt, *rows["response_ids"][0][rows["response_mask"][0]].tolist()]


@pytest.mark.parametrize(("ended", "end"), [(True, [END]), (False, [])])
def test_a_prompt_and_a_response_are_one_text(ended: bool, end: list[int]) -> None:
    assert told({"prompt": "ab"}, "cd", ended=ended) == [*b"abcd", *end]
    assert told({"prompt": "ab", "prompt_messages": "no messages"}, "", ended=ended) == [*b"ab", *end]


def test_the_end_that_a_tokenizer_adds_stands_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PreTrainedTokenizerBase.encode
    monkeypatch.setattr(PreTrainedTokenizerBase, "encode", lambda *args, **kw: [*plain(*args, **kw), END])
    assert told({"prompt": "ab"}, "cd") == [*b"abcd", END]


def test_messages_are_rendered_in_the_judges_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template has all special tokens: none that the tokenizer begins other texts with is added."""
    plain = PreTrainedTokenizerBase.encode
    monkeypatch.setattr(
        PreTrainedTokenizerBase,
        "encode",
        lambda *args, add_special_tokens=True: [*[END] * add_special_tokens, *plain(*args)],
    )
    row: dict[str, object] = {"prompt": "as the actor read them", "prompt_messages": MESSAGES}
    assert told(row, "cd", ended=False) == [259, *b"s", 260, *b"ab", 261, *b"cd", END]


CHATML = (
    "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<assistant>' }}"
    "{{ m['content'] + '<eos>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""A line break behind the end of each turn, as Qwen has it."""


def trained_on(messages: list[dict[str, str]], answer: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens from which a judge learns."""
    answers = (Answer(pieces=(answer,)),)
    draft = Draft(row={}, prompt=messages, prompt_field="prompt", where="row 1", answers=answers)
    encoded = encode_drafts([draft], tokenizer, Format(chat_template=True), name="rows")
    return [*encoded.prompts[0], *(encoded.responses or [])[0]]


@pytest.mark.parametrize("ended", [True, False])
def test_a_number_may_stand_where_models_trained_here_have_it(tmp_path: Path, *, ended: bool) -> None:
    plain = build_byte_tokenizer()
    plain.chat_template = CHATML
    plain.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    messages = MESSAGES[1:]
    trained = trained_on(messages, "cd", tokenizer)
    assert trained == [260, *b"ab", END, 10, 261, *b"cd", END]
    row: dict[str, object] = {"prompt": "as the actor read them", "prompt_messages": messages}
    for reads_to, expected in (("end", trained if ended else trained[:-1]), ("template", [*trained, 10])):
        retelling = Retelling(tokenizer=tokenizer, reads_to=reads_to)  # type: ignore[arg-type]
        rows = retelling.rows([row], ["cd"], ended=[ended])
        assert [*rows["prompt_ids"][0].tolist(), *rows["response_ids"][0].tolist()] == expected


@pytest.mark.parametrize("between", ["", " "])
def test_a_response_begins_as_the_judge_was_trained_on_it(tmp_path: Path, between: str) -> None:
    """Its tokenizer puts a space before a text alone, which stands there only if the template has it."""
    turn = "{{ 'BETWEEN' + m.content if m.role == 'assistant' else '+' + m.content + '=' }}"
    template = f"{{% for m in messages %}}{turn}{{% endfor %}}".replace("BETWEEN", between)
    tokenizer = load_tokenizer(write_spacing(tmp_path, "\n235+=", template=template))
    messages = [{"role": "user", "content": "2+3"}]
    trained = trained_on(messages, "5", tokenizer)
    row: dict[str, object] = {"prompt": "as the actor read them", "prompt_messages": messages}
    rows = Retelling(tokenizer=tokenizer, reads_to="end").rows([row], ["5"], ended=[True])
    assert [*rows["prompt_ids"][0].tolist(), *rows["response_ids"][0].tolist()] == trained


def test_a_response_without_tokens_is_not_judged() -> None:
    assert told({"prompt": "ab"}, None) == []


def test_the_beginning_is_left_out_where_there_are_too_many_tokens() -> None:
    with pytest.warns(UserWarning, match="reads 3 tokens: the beginnings of longer conversations"):
        assert told({"prompt": "ab"}, "cd", positions=3) == [*b"cd", END]
