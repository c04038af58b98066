"""Given answers behind chat templates that write thoughts: the prompt and the answer are the conversation."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rlhf_lightning.data import StepData
from rlhf_lightning.data.thoughts import turn_of
from tests.unit.data.conftest import Writer, batches, write_template
from tests.unit.data.test_completions import completion_data

USER = "{% for m in messages %}{% if m.role == 'user' %}{{ 'U:' + m.content + '\n' }}{% else %}"
EMPTY = "{{ 'A:' + ('' if '</think>' in m.content else '<think>\n\n</think>\n\n') + m.content }}"
SAID = "{{ 'A:' + m.content.split('</think>')[-1].strip() }}"
END = "{% endif %}{% endfor %}{% if add_generation_prompt %}"
TEMPLATES = {
    "qwen3": USER + EMPTY + END + "{{ 'A:' }}{% endif %}",
    "qwen3-thinking": USER + EMPTY + END + "{{ 'A:<think>\n' }}{% endif %}",
    "qwen3-off": USER + EMPTY + END + "{{ 'A:<think>\n\n</think>\n\n' }}{% endif %}",
    "deepseek-r1": USER + SAID + END + "{{ 'A:<think>\n' }}{% endif %}",
}
THOUGHT = "<think>\nlong\n</think>\n\nIt is 5."


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("answer", [THOUGHT, "It is 5.", " It is 5."])
def test_a_thought_is_begun_once_and_ended(
    write_rows: Writer, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, answer: str
) -> None:
    """Prompt and answer are what the template makes of both, but for the thoughts that DeepSeek's drops."""
    tokenizer = write_template(tmp_path, TEMPLATES[kind])
    file = write_rows({"prompt": "2 + 3?", "response": answer})
    with caplog.at_level(logging.WARNING):
        data = completion_data(file, chat_template=True, tokenizer=tokenizer, batch_size=1)
    response = bytes(next(iter(data.train_dataloader()))["response_ids"][0].tolist()[:-1]).decode()
    second = kind == "qwen3-off" and answer == THOUGHT
    empty = "" if kind == "deepseek-r1" or (answer == THOUGHT and not second) else "<think>\n\n</think>\n\n"
    begun = "<think>\n" if kind == "deepseek-r1" and answer != THOUGHT else ""
    assert str(data.train_rows[0]["prompt"]) + response == f"U:2 + 3?\nA:{begun}{empty}{answer}"
    told = f"{file}: 1 of 1 answers have no </think>, and the chat template of {tokenizer} ends a prompt with"
    assert (told in caplog.text) == bool(begun)
    assert (f"{file}: 1 of 1 answers have a thought, up to </think>, and the" in caplog.text) == second


def test_a_thought_without_its_beginning_is_one() -> None:
    """What a model answers, which the prompt has begun for."""
    turn = turn_of("U:2\nA:<think>\n", "U:2\nA:<think>\n\n</think>\n\n")
    assert turn.after_prompt("long\n</think>\n\n5") == "long\n</think>\n\n5"
    assert turn.after_prompt("5") == "\n</think>\n\n5"


def test_a_thought_whose_end_the_conversation_has_in_the_place_of_its_beginning() -> None:
    """As GLM-4.7's template has it, and DeepSeek-V3.1's with thinking."""
    turn = turn_of("U:2\nA:<think>", "U:2\nA:</think>")
    assert turn.is_open
    assert turn.after_prompt("<think>long</think>5") == "long</think>5"
    assert turn.after_prompt("5") == "</think>5"
    spaced = turn_of("U:2\nA:<think>", "U:2\nA:\n<think>\n\n</think>\n\n")
    assert spaced.after_prompt("5") == "\n\n</think>\n\n5"


@pytest.mark.parametrize(
    ("lead", "opening"), [("<think>\n\n</think>\n\n", "<think>\n"), ("\n<think></think>\n", "\n<think>")]
)
def test_what_stands_before_a_thought_is_there_with_any(lead: str, opening: str) -> None:
    """Qwen3's template and GLM-4.5's; the thought's own tag may be missing, as in answers of DeepSeek-R1."""
    turn = turn_of("U:2\nA:", "U:2\nA:" + lead)
    assert turn.after_prompt("long\n</think>\n\n5") == opening + "long\n</think>\n\n5"
    assert turn.after_prompt("<think>\nlong</think>5") == opening.rstrip() + "\nlong</think>5"
    assert turn.after_prompt("5") == lead + "5"


@pytest.mark.parametrize(("last", "begins"), [("</think>5", "long"), ("5", "\n</think>\n\nlong")])
def test_a_thought_may_end_in_a_later_step(
    write_rows: Writer, tmp_path: Path, caplog: pytest.LogCaptureFixture, last: str, begins: str
) -> None:
    for kind in ("qwen3-thinking", "deepseek-r1"):
        tokenizer = write_template(tmp_path / kind, TEMPLATES[kind])
        file = write_rows({"prompt": "2 + 3?", "steps": ["long", last], "labels": [1, 1]})
        data = StepData(path=str(file), tokenizer=tokenizer, chat_template=True, batch_size=1)
        ids = batches(data)[0]["response_ids"][0].tolist()
        open_end = kind == "deepseek-r1" and last == "5"
        assert bytes(ids[:-1]).decode() == f"{'long' if open_end else begins}\n{last}"
        assert (" answers have no </think>" in caplog.text) == open_end


def test_a_template_that_wants_a_system_prompt_leaves_answers_as_they_are(
    write_rows: Writer, tmp_path: Path
) -> None:
    wants = "{% if messages[0].role != 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
    tokenizer = write_template(tmp_path, f"{wants}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}")
    said = [{"role": role, "content": role} for role in ("system", "user")]
    file = write_rows({"prompt": said, "response": " 5"})
    data = completion_data(file, chat_template=True, tokenizer=tokenizer, batch_size=1)
    assert bytes(batches(data)[0]["response_ids"][0].tolist()[:-1]).decode() == " 5"


@pytest.mark.parametrize("before", ["U:2\nA:", "U:2\nB:<b>", "U:2\nA: ", "U:2\nA:[/INST]", "U:2\n"])
def test_other_templates_write_no_thought(before: str) -> None:
    turn = turn_of("U:2\n<assistant>" if before == "U:2\n" else "U:2\nA:", before)
    assert not turn.tag
    assert turn.after_prompt("<b>5</b>").strip() == "<b>5</b>"


def test_a_line_before_the_tag_is_none_before_an_answer() -> None:
    turn = turn_of("U:2\nA:\n<think>\n", "U:2\nA:\n")
    assert turn.is_open
    assert (turn.lead, turn.after_prompt("5")) == ("", "5")


def test_tags_may_have_capitals() -> None:
    assert turn_of("U:2\nA:<Think>", "U:2\nA:").tag == "<Think>"
    assert turn_of("U:2\nA:", "U:2\nA:<THINK></THINK>").tag == "<THINK>"


def test_brackets_are_tags_too() -> None:
    turn = turn_of("[INST]2[/INST][THINK]", "[INST]2[/INST]")
    assert (turn.tag, turn.closing) == ("[THINK]", "[/THINK]")
    assert turn.after_prompt("[THINK]long[/THINK]5") == "long[/THINK]5"
