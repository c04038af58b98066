"""Prompts in a chat template, which begins them and whose messages come in turns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from rlhf_lightning.data import CompletionData, PreferenceData, PromptData, UnpairedData
from tests.embedded_model import build_byte_tokenizer
from tests.unit.data.conftest import Writer, batches, prompt_data, write_template
from tests.unit.rlhf import Rlhf

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_chat_template_and_messages(write_rows: Writer) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    file = write_rows({"prompt": messages}, {"prompt": "hi"})
    batch = batches(prompt_data(file, chat_template=True, shuffle=False, prompt_template="{prompt}!"))[0]
    assert [row["prompt"] for row in batch["rows"]] == [
        "<system>be brief<user>hi<assistant>",
        "<user>hi!<assistant>",
    ]
    assert batch["prompt_ids"][1, -5:].tolist() == [260, 104, 105, 33, 261]
    said = [{"role": "user", "content": "hi!"}]
    assert [row["prompt_messages"] for row in batch["rows"]] == [messages, said]
    with pytest.raises(
        ValueError, match=r"row 1: the field 'prompt' holds a list of messages.*--data.chat_template"
    ):
        prompt_data(file)


def test_every_turn_of_a_prompt_is_rendered(write_rows: Writer) -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    batch = batches(prompt_data(write_rows({"prompt": messages}), chat_template=True, batch_size=1))[0]
    assert batch["rows"][0]["prompt"] == "<system>s<user>a<assistant>b<eos><user>c<assistant>"
    assert batch["prompt_ids"].tolist() == [[259, 115, 260, 97, 261, 98, 258, 260, 99, 261]]
    assert batch["prompt_mask"].all()


def test_messages_that_end_with_an_answer(write_rows: Writer) -> None:
    """As in data to imitate; a model would learn to answer behind the answer."""
    file = write_rows({"messages": TURNS[:1]}, {"messages": TURNS})
    with pytest.raises(
        ValueError,
        match=r"row 2: the last message in the field 'messages' is the assistant's, .* Remove that message, "
        r"or imitate it: --data completiondata --data\.response_field messages\.",
    ):
        prompt_data(file, chat_template=True, prompt_field="messages")
    twice = "\n\nHuman: a\n\nAssistant: b\n\nAssistant: c"
    options = {"prompt_field": "chosen", "dialogue": True, "chat_template": True, "batch_size": 1}
    data = prompt_data(write_rows({"chosen": twice}), **options)
    assert data.train_rows[0]["prompt"] == "<user>a<assistant>b<eos><assistant>", "its answer is cut off"


@pytest.mark.parametrize(
    ("kind", "row", "field"),
    [
        (PreferenceData, {"prompt": TURNS, "chosen": "c", "rejected": "d"}, {}),
        (UnpairedData, {"prompt": TURNS, "response": "c", "label": True}, {}),
        (CompletionData, {"prompt": TURNS[1:]}, {"response_field": "prompt"}),
    ],
)
def test_a_prompt_that_ends_with_an_answer_beside_the_answers(
    kind: type[PromptData], row: dict[str, object], field: dict[str, str], write_rows: Writer
) -> None:
    """They need none of the prompt's, and one alone answers nothing: to imitate it is no way out."""
    options = {"tokenizer": "embedded", "batch_size": 1, "chat_template": True}
    data = kind(path=str(write_rows(row)), **options, **field)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"is the assistant's, .* answer\. Remove that message or the row\.$"
    ):
        data.setup("fit")


def test_messages_that_the_chat_template_refuses(write_rows: Writer, tmp_path: Path) -> None:
    strict = write_template(tmp_path / "tokenizer", "{{ raise_exception('no system role') }}")
    file = write_rows({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]})
    with pytest.raises(ValueError, match=r"row 1: the tokenizer's chat .*of system, user \(no system role\)"):
        prompt_data(file, chat_template=True, tokenizer=strict)


def test_variables_of_the_chat_template(write_rows: Writer, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if enable_thinking is false %} plainly{% endif %}"
    options = {"chat_template": True, "tokenizer": write_template(tmp_path, template), "batch_size": 1}

    def told(**variables: object) -> object:
        data = prompt_data(write_rows({"prompt": "hi"}), **options, chat_template_options=variables)
        return data.train_rows[0]["prompt"]

    assert (told(), told(enable_thinking=True), told(enable_thinking=False)) == ("hi", "hi", "hi plainly")
    for unknown in ("enable_thinkin_", "add_generation_prompt"):
        with pytest.raises(ValueError, match=f"has no '{unknown}' that could be set"):
            told(**{unknown: False})
    with pytest.raises(ValueError, match=r"which is not used\. Add --data\.chat_template true"):
        prompt_data(write_rows({"prompt": "hi"}), chat_template_options={"enable_thinking": False})


@pytest.mark.parametrize("text", [json.dumps(TURNS), json.dumps(TURNS, indent=1), str(TURNS), f"{TURNS}\n"])
def test_messages_as_a_text(write_rows: Writer, text: str) -> None:
    """As tables and data frames hold them; the actor would read brackets and quotes."""
    file = write_rows({"prompt": "a", "response": "b"}, {"prompt": text, "response": text})
    for chat in (False, True):
        with pytest.raises(
            ValueError, match=r"row 2: the field 'prompt' holds messages as a text, .* json\.loads"
        ):
            prompt_data(file, chat_template=chat)
        data = CompletionData(path=str(file), tokenizer="embedded", chat_template=chat, batch_size=1)
        with pytest.raises(ValueError, match=r"row 2: the field 'response' holds messages as a text, "):
            data.setup("fit")


@pytest.mark.parametrize("text", [f"{TURNS} Who speaks?", '[{"name": "role"}]', "[{'content': 'a'}]", "[]"])
def test_a_text_that_begins_like_messages(write_rows: Writer, text: str) -> None:
    assert prompt_data(write_rows({"prompt": text}), batch_size=1).train_rows[0]["prompt"] == text


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "calc"}}]}


@pytest.fixture
def renders_calls(tmp_path: Path) -> str:
    return write_template(
        tmp_path,
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}{% endfor %}",
    )


def imitated(file: Path, tokenizer: str) -> CompletionData:
    options = {"tokenizer": tokenizer, "response_field": "messages"}
    data = CompletionData(path=str(file), chat_template=True, batch_size=1, **options)  # type: ignore[arg-type]
    data.setup("fit")
    return data


def test_a_call_needs_no_content(write_rows: Writer, renders_calls: str) -> None:
    """As OpenAI and transformers write it; in prompts, and before answers that are imitated."""
    bare = {name: value for name, value in CALL.items() if name != "content"}
    asked, called = "<user>a<assistant>[calc]<tool>7", [TURNS[0], CALL, {"role": "tool", "content": "7"}]
    file = write_rows({"prompt": called}, {"prompt": [called[0], bare, called[2]]})
    data = prompt_data(file, chat_template=True, tokenizer=renders_calls)
    assert [row["prompt"] for row in data.train_rows] == [asked, asked]
    assert data.train_rows[0]["prompt_messages"] == called, "null as it is: templates tell it from a text"
    for prompt in (called[:1], called[:2], called, "a"):
        row = {"prompt": prompt, "messages": [*called, TURNS[1]]}
        assert imitated(write_rows(row), renders_calls).train_rows[0]["prompt"] == asked


def test_a_template_that_cannot_render_a_call(write_rows: Writer) -> None:
    file = write_rows({"prompt": [TURNS[0], CALL, {"role": "tool", "content": "7"}]})
    with pytest.raises(
        ValueError, match=r"row 1: .* chat template refuses messages of user, assistant, tool \("
    ):
        prompt_data(file, chat_template=True, batch_size=1)


@pytest.mark.parametrize("said", ["", None, "Let me see."])
def test_an_answer_that_is_a_call(write_rows: Writer, renders_calls: str, said: str | None) -> None:
    """It would be imitated without the call."""
    file = write_rows({"messages": [TURNS[0], {**CALL, "content": said}]})
    with pytest.raises(ValueError, match="row 1: the last message in the field 'messages' has tool_calls"):
        imitated(file, renders_calls)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "assistant", "content": None}, "the content of message 2 (assistant) is null, and has"),
        ({"role": "user"}, "the content of message 2 (user) is null"),
        ({"role": "tool", "content": [{"text": "a"}]}, "content of message 2 (tool) is a list, and has to"),
        ({"role": "user", "content": {}, "tool_calls": CALL["tool_calls"]}, "message 2 (user) is a dict"),
        ({"content": "a"}, "item 2 is not a {role, content} message."),
        (3, "item 2 is not a {role, content} message."),
    ],
)
@pytest.mark.parametrize("field", ["prompt", "response"])
def test_the_message_that_is_wrong_is_named(
    write_rows: Writer, message: object, why: str, field: str
) -> None:
    good = {"prompt": "ok", "response": "ok"}
    file = write_rows(good, {**good, field: [TURNS[0], message, TURNS[1]]})
    kind = CompletionData if field == "response" else PromptData
    data = kind(path=str(file), tokenizer="embedded", chat_template=True, batch_size=1)
    with pytest.raises(ValueError, match=rf"row 2: the field '{field}' holds .*{re.escape(why)}"):
        data.setup("fit")


def tool(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture
def renders_tools(tmp_path: Path) -> str:
    return write_template(
        tmp_path,
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )


def test_tools_of_a_row_reach_the_template(write_rows: Writer, renders_tools: str) -> None:
    """A list, or a JSON text of one, as data sets store it; before those of the options."""
    no_tools: tuple[object, ...] = (None, [], "", " ", "[]", "null")
    told: tuple[object, ...] = ([tool("calc"), tool("find")], json.dumps([tool("say")]), *no_tools)
    rows = [{"prompt": "hi", "tools": tools} for tools in told]
    file = write_rows(*rows, {"prompt": TURNS[:1]})
    options = {"chat_template": True, "tokenizer": renders_tools}
    prompts = [row["prompt"] for row in prompt_data(file, **options).train_rows]
    assert prompts == ["[calc][find]hi", "[say]hi", *["hi"] * len(no_tools), "a"]
    own = prompt_data(file, **options, chat_template_options={"tools": [tool("all")]})
    prompts = [row["prompt"] for row in own.train_rows]
    assert prompts == ["[calc][find]hi", "[say]hi", *["[all]hi"] * len(no_tools), "[all]a"]


@pytest.mark.parametrize("kind", [CompletionData, PreferenceData])
def test_tools_beside_given_answers(write_rows: Writer, renders_tools: str, kind: type[PromptData]) -> None:
    row = {"prompt": "hi", "tools": [tool("calc")], "response": "x", "chosen": "y", "rejected": "z"}
    data = kind(path=str(write_rows(row)), tokenizer=renders_tools, chat_template=True, batch_size=1)
    data.setup("fit")
    assert data.train_rows[0]["prompt"] == "[calc]hi"


@pytest.mark.parametrize("tools", ["calc", ["calc"], '{"type": "function"}', 3])
def test_what_are_no_tools(write_rows: Writer, renders_tools: str, tools: object) -> None:
    file = write_rows({"prompt": "hi"}, {"prompt": "hi", "tools": tools})
    with pytest.raises(ValueError, match=r"row 2: the field 'tools' holds .* rename the field\.$"):
        prompt_data(file, chat_template=True, tokenizer=renders_tools)
    assert prompt_data(file).train_rows[1]["tools"] == tools, "without a template a field as any other"


def test_a_template_without_a_place_for_tools(write_rows: Writer, caplog: pytest.LogCaptureFixture) -> None:
    file = write_rows({"prompt": "hi", "tools": [tool("calc")]}, {"prompt": "hi"})
    prompt_data(file, chat_template=True)
    assert "1 of 2 rows have a field 'tools', for which the chat template of" in caplog.text


def test_a_tokenizer_without_a_chat_template(write_rows: Writer, tmp_path: Path) -> None:
    plain = write_template(tmp_path, None)
    with pytest.raises(
        ValueError, match=r"data.chat_template=true: the tokenizer of .* has no chat template"
    ):
        prompt_data(write_rows({"prompt": "hi"}), chat_template=True, tokenizer=plain)


def test_begin_token_comes_from_the_tokenizer_or_from_the_template(
    write_rows: Writer, tmp_path: Path
) -> None:
    beginning = build_byte_tokenizer()
    beginning.backend_tokenizer.post_processor = TemplateProcessing(
        "<bos> $0", special_tokens=[("<bos>", 257)]
    )
    beginning.chat_template = "<bos>{{ messages[0]['content'] }}"
    beginning.save_pretrained(tmp_path / "tokenizer")
    for chat in (False, True):
        data = prompt_data(
            write_rows({"prompt": "a"}, {"prompt": "b" if chat else "<bos>b"}),
            tokenizer=str(tmp_path / "tokenizer"),
            chat_template=chat,
            shuffle=False,
        )
        assert batches(data)[0]["prompt_ids"].tolist() == [[257, 97], [257, 98]], "once, either way"


def test_tools_for_all_rows_are_typed(
    rlhf: Rlhf, write_rows: Writer, tmp_path: Path, renders_tools: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(write_rows({"prompt": "a"}))
    words = ("fit", "--algo", "grpo", "--data", "promptdata", "--data.path", file, "--data.batch_size", "1")
    chat = ("--data.tokenizer", renders_tools, "--data.chat_template=true", "--data.max_prompt_tokens", "2")
    tools = "{tools: [{type: function, function: {name: calc}}]}"
    said = rlhf.refused(*words, *chat, "--data.chat_template_options", tools)
    assert "the shortest prompt has 7 tokens" in said, "[calc]a"
