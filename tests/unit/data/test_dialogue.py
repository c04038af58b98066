"""Dialogues in one text."""

from __future__ import annotations

import pytest

from rlhf_lightning.data.dialogue import as_messages, is_dialogue, split_dialogues

TWO = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"


def test_the_prompt_ends_at_the_last_shared_turn() -> None:
    assert split_dialogues([f"{TWO} d", f"{TWO} e"], where="") == (TWO, [" d", " e"])
    assert split_dialogues([f"{TWO} d"], where="") == (TWO, [" d"])
    early = "\n\nHuman: a\n\nAssistant: x\n\nHuman: c\n\nAssistant: d"
    prompt, rests = split_dialogues([f"{TWO} d", early], where="")
    assert prompt == "\n\nHuman: a\n\nAssistant:"
    assert rests == [" b\n\nHuman: c\n\nAssistant: d", " x\n\nHuman: c\n\nAssistant: d"]


def test_a_turn_in_one_of_them_alone_is_not_shared() -> None:
    longer = f"{TWO} d\n\nHuman: e\n\nAssistant: f"
    assert split_dialogues([longer, f"{TWO} d"], where="")[0] == TWO
    assert split_dialogues([f"{TWO} d", longer], where="")[0] == TWO


def test_nothing_is_shared() -> None:
    with pytest.raises(ValueError, match=r"row 3: '.*Human: q.*' is not a dialogue, or shares no turn"):
        split_dialogues(["\n\nHuman: q\n\nAssistant: d", f"{TWO} d"], where="row 3")


def test_turns_become_messages() -> None:
    assert as_messages(TWO, where="") == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    doubled = as_messages("Human: a\n\nHuman: Assistant: says\n\nAssistant:", where="")
    assert doubled == [{"role": "user", "content": "a\n\nAssistant: says"}], "a name inside a turn is none"
    with pytest.raises(ValueError, match=r"row 3: a dialogue begins with .* this one with 'Note'"):
        as_messages(f"Note{TWO}", where="row 3")


@pytest.mark.parametrize(
    "value", [None, 3, "", "Human: a", "Assistant: a\n\nHuman: b", "I am Human: Assistant:"]
)
def test_what_is_no_dialogue(value: object) -> None:
    assert not is_dialogue(value)
    assert is_dialogue(TWO)
    assert is_dialogue("Human: a\n\nAssistant:")
