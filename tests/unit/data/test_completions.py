"""CompletionData: responses to imitate."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tokenizers.normalizers import Replace
from transformers import GenerationConfig

from rlhf_lightning.data import CompletionData
from tests.embedded_model import build_byte_tokenizer
from tests.unit.data.conftest import Writer, write_spacing, write_template


def completion_data(file: object, **options: object) -> CompletionData:
    given = {"path": str(file), "tokenizer": "embedded", "batch_size": 2, "shuffle": False}
    data = CompletionData(**given | options)  # type: ignore[arg-type]
    data.setup("fit")
    return data


def test_responses_are_right_padded_and_end(write_rows: Writer) -> None:
    file = write_rows({"prompt": "a", "response": "x"}, {"prompt": "bc", "response": "yz"})
    batch = next(iter(completion_data(file).train_dataloader()))
    assert batch["prompt_ids"].tolist() == [[256, 97], [98, 99]]
    assert batch["response_ids"].tolist() == [[120, 258, 256], [121, 122, 258]]
    assert batch["response_mask"].tolist() == [[True, True, False], [True, True, True]]


@pytest.mark.parametrize("response", ["5", " 5", "\n5"])
@pytest.mark.parametrize("between", [None, "", " ", "+"])
def test_a_response_begins_without_a_space_that_nobody_wrote(
    write_rows: Writer, tmp_path: Path, response: str, between: str | None
) -> None:
    """Or with the one that a chat template puts there, in what the model generates, too."""
    answer = "{{ 'BETWEEN' + m.content if m.role == 'assistant' else '+' + m.content + '=' }}"
    turns = f"{{% for m in messages %}}{answer}{{% endfor %}}"
    template = None if between is None else turns.replace("BETWEEN", between)
    path = write_spacing(tmp_path / "spacing", "\n235+=", template=template)
    file = write_rows({"prompt": "2+3=", "response": response}, {"prompt": "2", "response": "3"})
    data = completion_data(file, tokenizer=path, batch_size=1, chat_template=between is not None)
    ids = next(iter(data.train_dataloader()))["response_ids"][0].tolist()
    characters = "\u2581\n235+="
    lead = between if between == " " and not response[:1].isspace() else ""
    written = lead + response
    assert "".join(characters[token - 1] for token in ids[:-1]) == written.replace(" ", "\u2581")
    assert ids[-1] == 0


@pytest.mark.parametrize(("response", "expected"), [("No", " No"), (" No", " No"), ("\nNo", "\nNo")])
def test_the_space_of_a_chat_template_is_there_with_any_tokenizer(
    write_rows: Writer, tmp_path: Path, response: str, expected: str
) -> None:
    tokenizer = write_template(
        tmp_path,
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
    )
    file = write_rows({"prompt": "a", "response": response})
    data = completion_data(file, chat_template=True, tokenizer=tokenizer, batch_size=1)
    assert data.train_rows[0]["prompt"] == "user: aassistant:"
    assert next(iter(data.train_dataloader()))["response_ids"].tolist() == [[*expected.encode(), 258]]


def test_a_response_that_is_written_with_its_end_ends_once(write_rows: Writer) -> None:
    data = completion_data(write_rows({"prompt": "a", "response": "b<eos>"}), batch_size=1)
    assert next(iter(data.train_dataloader()))["response_ids"].tolist() == [[98, 258]]


def test_long_responses_are_dropped(write_rows: Writer, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "a" * p, "response": "x" * r} for p, r in ((1, 1), (5, 1), (1, 4), (5, 4), (1, 3))]
    with caplog.at_level(logging.WARNING):
        data = completion_data(write_rows(*rows), max_prompt_tokens=4, max_response_tokens=4)
    assert [row["response"] for row in data.train_rows] == ["x", "xxx"], "the end token counts"
    assert "3 of 5 rows dropped (2 with a prompt longer than" in caplog.text
    assert "2 with a response longer than data.max_response_tokens=4)" in caplog.text


def test_row_without_a_response(write_rows: Writer) -> None:
    file = write_rows({"prompt": "a", "response": "x"}, {"prompt": "b"})
    with pytest.raises(
        ValueError, match=r"data\.response_field=response: .*row 2 has no such field; it has: prompt"
    ):
        completion_data(file)
    with pytest.raises(
        ValueError, match=r"row 1: the field 'response' holds 3 \(int\); a response is a text"
    ):
        completion_data(write_rows({"prompt": "a", "response": 3}))


@pytest.mark.parametrize("name", ["completion", "messages", "output"])
def test_names_of_trl_are_suggested(write_rows: Writer, name: str) -> None:
    """No spelling is near these, and they are what most published data has."""
    with pytest.raises(ValueError, match=rf"it has: prompt, {name}\. Try --data\.response_field {name}\."):
        completion_data(write_rows({"prompt": "a", name: "x"}))


def test_data_of_texts_is_suggested(write_rows: Writer) -> None:
    """As TRL's SFTTrainer learns them from the same field."""
    with pytest.raises(ValueError, match=r"it has: text\. Whole texts are learned with --data textdata\.$"):
        completion_data(write_rows({"text": "a"}))
    with pytest.raises(
        ValueError, match=r"row 2 has no such field; it has: prompt, text\. Correct or remove"
    ):
        completion_data(
            write_rows({"prompt": "a", "response": "b", "text": "ab"}, {"prompt": "a", "text": "ab"})
        )


def test_a_conversation_brings_its_prompt_along(write_rows: Writer) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    data = completion_data(
        write_rows({"messages": messages}), response_field="messages", chat_template=True, batch_size=1
    )
    batch = next(iter(data.train_dataloader()))
    assert batch["rows"][0]["prompt"] == "<user>a<assistant>b<eos><user>c<assistant>"
    assert batch["response_ids"].tolist() == [[100, 258]]
    with pytest.raises(
        ValueError, match=r"the field 'messages' holds a list of messages.*chat_template true"
    ):
        completion_data(write_rows({"messages": messages}), response_field="messages")
    with pytest.raises(ValueError, match=r"a list of \{role, content\} messages, the assistant's last"):
        completion_data(write_rows({"messages": messages[:3]}), response_field="messages", chat_template=True)


SYSTEM = {"role": "system", "content": "s"}
ASKED = [{"role": "user", "content": "a"}]
CALLED = [{"role": "assistant", "content": "c"}, {"role": "user", "content": "r"}]


@pytest.mark.parametrize("before", [ASKED, [SYSTEM, *ASKED], [SYSTEM, *ASKED, *CALLED]])
@pytest.mark.parametrize("fields", ["one", "both", "cut"])
def test_an_answer_is_no_part_of_its_prompt(
    write_rows: Writer, before: list[dict[str, str]], fields: str
) -> None:
    """Whether the conversation's field is named for both, or the prompt's holds all of it, too."""
    whole = [*before, {"role": "assistant", "content": " d "}]
    own = {"one": {}, "both": {"prompt": whole}, "cut": {"prompt": [CALLED[0], *whole]}}[fields]
    named = {"response_field": "messages", "prompt_field": "messages" if fields == "one" else "prompt"}
    file = write_rows({"messages": whole, **own})
    batch = next(iter(completion_data(file, chat_template=True, batch_size=1, **named).train_dataloader()))
    asked = [*([CALLED[0]] if fields == "cut" else []), *before]
    assert batch["rows"][0]["prompt_messages"] == asked
    assert batch["response_ids"].tolist() == [[32, 100, 32, 258]]


def test_the_same_answer_to_two_questions_stays(write_rows: Writer) -> None:
    """What the prompt holds is only then the whole conversation, if the messages before the answer say so."""
    yes, other = {"role": "assistant", "content": "y"}, {"role": "user", "content": "b"}
    file = write_rows({"prompt": [*ASKED, yes], "messages": [other, yes]})
    data = completion_data(file, chat_template=True, batch_size=1, response_field="messages")
    assert data.train_rows[0]["prompt_messages"] == [*ASKED, yes, other]


def test_one_field_for_prompt_and_answer(write_rows: Writer) -> None:
    named = {"prompt_field": "text", "response_field": "text", "batch_size": 1}
    dialogue = write_rows({"text": "\n\nHuman: a\n\nAssistant: b"})
    assert completion_data(dialogue, **named).train_rows[0]["prompt"] == "\n\nHuman: a\n\nAssistant:"
    with pytest.raises(
        ValueError, match=r"row 1: the field 'text' holds a text, and is named for the prompt"
    ):
        completion_data(write_rows({"text": "a"}), **named)


@pytest.mark.parametrize(
    "case",
    [
        ("<extra_0>\n", [258, 262], 262, False),
        ("<extra_0>\n", [258], 258, True),
        ("<extra_0>\n", None, 258, True),
        ("<eos>\n", [258], 258, False),
        ("\n", [258, 262], 258, False),
        ("", None, 258, False),
    ],
)
def test_a_response_ends_as_the_chat_template_ends_it_where_the_model_stops_there(
    write_rows: Writer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    case: tuple[str, list[int] | None, int, bool],
) -> None:
    (behind, stops, end, warned), tokenizer = case, build_byte_tokenizer()
    turn = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}BEHIND{% endfor %}"
    tokenizer.chat_template = turn.replace("BEHIND", behind.replace("\n", "{{ '\\n' }}"))
    tokenizer.save_pretrained(tmp_path)
    if stops is not None:
        GenerationConfig(eos_token_id=stops).save_pretrained(tmp_path)
    file = write_rows({"prompt": "a", "response": "b"})
    data = completion_data(file, chat_template=True, tokenizer=str(tmp_path), batch_size=1)
    assert next(iter(data.train_dataloader()))["response_ids"].tolist() == [[98, end]]
    assert ("at which the model does not stop" in caplog.text) == warned


def test_a_dialogue_brings_its_prompt_along(write_rows: Writer) -> None:
    file = write_rows({"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"})
    data = completion_data(file, response_field="chosen", batch_size=1)
    assert data.train_rows[0]["prompt"] == "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    assert next(iter(data.train_dataloader()))["response_ids"].tolist() == [[32, 100, 258]]


def test_an_empty_response(write_rows: Writer) -> None:
    rows = ({"prompt": "a", "response": "x"}, {"prompt": "b", "response": ""})
    with pytest.raises(ValueError, match=r"row 2: the field 'response' holds an empty response\. Remove the"):
        completion_data(write_rows(*rows))


def test_a_response_without_tokens(write_rows: Writer, tmp_path: Path) -> None:
    deaf = build_byte_tokenizer()
    deaf.backend_tokenizer.normalizer = Replace("x", "")
    deaf.save_pretrained(tmp_path / "tokenizer")
    rows = ({"prompt": "a", "response": "ax"}, {"prompt": "b", "response": "x"})
    with pytest.raises(ValueError, match=r"row 2: the response 'x' has no tokens\. Remove the row"):
        completion_data(write_rows(*rows), tokenizer=str(tmp_path / "tokenizer"))


def test_lengths_are_those_of_what_is_done_with_the_rows(write_rows: Writer) -> None:
    data = completion_data(write_rows({"prompt": "abc", "response": "x"}), batch_size=1)
    data.check_lengths(positions=5, new_tokens=9, generates=False)
    with pytest.raises(ValueError, match="the longest prompt and response have 5 tokens"):
        data.check_lengths(positions=4, new_tokens=0, generates=False)
    data.check_lengths(positions=12, new_tokens=9, generates=True)
    with pytest.raises(ValueError, match=r"sampling\.max_new_tokens=9: with the longest prompt, 3 tokens"):
        data.check_lengths(positions=11, new_tokens=9, generates=True)


CALL: dict[str, object] = {
    "role": "assistant",
    "content": "I add.",
    "tool_calls": [{"function": {"name": "add"}}],
}


def test_every_answer_is_learned_after_the_messages_before_it(write_rows: Writer) -> None:
    """Not a greeting that nothing asks for, and no call; as if each were the last of a row."""
    roles = ["system", *("assistant", "user") * 2, "assistant"]
    said = zip(roles, ["s", "hi", "a", "b", "c", " d"], strict=True)
    whole: list[dict[str, object]] = [{"role": role, "content": content} for role, content in said]
    silent: dict[str, object] = {"role": "assistant", "content": ""}
    whole[4:4] = [silent, {"role": "user", "content": "e"}, CALL, {"role": "tool", "content": "f"}]
    rows = [{"messages": whole, "source": 1}, {"messages": whole[2:4], "source": 2}]
    each = [{"messages": whole[:4]}, {"messages": whole}, {"messages": whole[2:4]}]
    options = {"chat_template": True, "response_field": "messages", "batch_size": 3}
    data = completion_data(write_rows(*rows), every_answer=True, **options)
    found = next(iter(data.train_dataloader()))
    expected = next(iter(completion_data(write_rows(*each, name="each.jsonl"), **options).train_dataloader()))
    for column in ("prompt_ids", "prompt_mask", "response_ids", "response_mask", "row_ids"):
        assert found[column].tolist() == expected[column].tolist(), column
    assert [row["source"] for row in data.train_rows] == [1, 1, 2]
    assert [row["prompt_messages"] for row in data.train_rows] == [whole[:3], whole[:-1], whole[2:3]]
    whole[-1] = silent
    with pytest.raises(ValueError, match=r"row 2: the field 'messages' holds an empty response"):
        completion_data(write_rows(rows[1], rows[0]), every_answer=True, **options)


def test_every_answer_is_told_apart_in_messages(write_rows: Writer) -> None:
    with pytest.raises(ValueError, match=r"data.every_answer=true: .* Add --data.chat_template true"):
        completion_data(write_rows({"prompt": "a", "response": "b"}), every_answer=True)
