"""PreferenceData: pairs side by side, from texts, conversations and dialogues, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from rlhf_lightning.data import PreferenceData, RowData, UnpairedData
from rlhf_lightning.data.sampler import HELD_OUT
from tests.unit.data.conftest import Writer, assert_resumes, batches

DATA = Path(__file__).parents[3].parent / "shared" / "data"
PAIRS = (
    {"prompt": "a", "chosen": "xy", "rejected": "z"},
    {"prompt": "bc", "chosen": "u", "rejected": "vwx"},
    {"prompt": "d", "chosen": "p", "rejected": "q"},
)
DIALOGUE = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"


def pairs(file: Path, **options: object) -> PreferenceData:
    given = {"path": str(file), "tokenizer": "embedded", "batch_size": 2, "shuffle": False}
    return PreferenceData(**given | options)  # type: ignore[arg-type]


def refused(file: Path, **options: object) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        pairs(file, **{"batch_size": 1} | options).setup("fit")
    return str(error.value).replace(str(file), "FILE")


def conversation(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[index % 2], "content": content}
        for index, content in enumerate(contents)
    ]


def test_chosen_and_rejected_stand_side_by_side(write_rows: Writer) -> None:
    data = pairs(write_rows(*PAIRS))
    first, last = batches(data)
    assert first["prompt_ids"].tolist() == [[256, 97], [256, 97], [98, 99], [98, 99]]
    assert first["prompt_mask"].tolist() == [[False, True]] * 2 + [[True, True]] * 2
    assert first["response_ids"].tolist() == [
        [120, 121, 258, 256],
        [122, 258, 256, 256],
        [117, 258, 256, 256],
        [118, 119, 120, 258],
    ]
    assert first["response_mask"].sum(1).tolist() == [3, 2, 2, 4]
    assert first["row_ids"].tolist() == [0, 1, 2, 3]
    assert first["row_ids"].dtype == torch.int64
    assert [row["prompt"] for row in first["rows"]] == ["a", "a", "bc", "bc"]
    assert first["rows"][1]["rejected"] == "z"
    assert last["response_ids"].tolist() == [[112, 258], [113, 258]], "the last batch has one pair"
    assert set(first) == {
        *("prompt_ids", "prompt_mask", "response_ids", "response_mask", "row_ids", "rows"),
        "group_ids",
    }
    assert first["group_ids"].tolist() == [0, 0, 2, 2]
    assert (data.batch_size, data.batch_rows, data.has_responses) == (2, 4, True)
    assert data.prompt_lengths == [1, 1, 2, 2, 1, 1]


def test_pairs_stay_together_when_shuffled(write_rows: Writer) -> None:
    rows = [{"prompt": f"p{n}", "chosen": f"c{n}", "rejected": f"r{n}"} for n in range(20)]
    data = pairs(write_rows(*rows), shuffle=True, batch_size=5)
    found = []
    for batch in batches(data):
        texts = [
            "".join(map(chr, ids[m][:-1]))
            for ids, m in zip(batch["response_ids"], batch["response_mask"], strict=True)
        ]
        prompts = [str(row["prompt"]) for row in batch["rows"]]
        assert [text.replace("c", "p") for text in texts[::2]] == prompts[::2]
        assert [text.replace("r", "p") for text in texts[1::2]] == prompts[1::2]
        found += prompts[::2]
    assert sorted(found) == sorted(f"p{n}" for n in range(20))
    assert found != [f"p{n}" for n in range(20)]


def test_row_ids_are_unique_over_epochs_and_held_out_pairs(write_rows: Writer) -> None:
    data = pairs(write_rows(*PAIRS), val_rows=1)
    data.setup("fit")
    loader = data.train_dataloader()
    ids = [key for _ in range(3) for batch in loader for key in batch["row_ids"].tolist()]
    held_out = [key for batch in data.val_dataloader()[0] for key in batch["row_ids"].tolist()]
    assert held_out == [2 * HELD_OUT, 2 * HELD_OUT + 1]
    assert len(set(ids + held_out)) == 3 * 4 + 2
    assert [row["prompt"] for row in data.held_out_rows] == ["d", "d"]
    assert len(pairs(write_rows(*PAIRS), limit=2).read().train) == 2


def test_margins_and_harmlessness(write_rows: Writer) -> None:
    rows = [
        {**row, "by": by, "s0": s0, "s1": s1}
        for row, by, s0, s1 in zip(PAIRS, (1, 0.5, -2), (True, 0, 1), (False, 1, True), strict=True)
    ]
    options = {"margin_field": "by", "safe_fields": ("s0", "s1"), "batch_size": 3}
    batch = batches(pairs(write_rows(*rows), **options))[0]
    assert batch["margins"].tolist() == [1.0, 1.0, 0.5, 0.5, -2.0, -2.0]
    assert batch["margins"].dtype == torch.float32
    assert batch["safe"].tolist() == [True, False, False, True, True, True]
    assert batch["safe"].dtype == torch.bool


def test_over_long_and_equal_pairs_are_counted_and_dropped(
    write_rows: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": "a", "chosen": "xyz", "rejected": "z"},
        {"prompt": "abcde", "chosen": "x", "rejected": "z"},
        {"prompt": "a", "chosen": "x", "rejected": "uvwxyz"},
        {"prompt": "a", "chosen": "x", "rejected": "x"},
        {"prompt": "b", "chosen": "x", "rejected": "y"},
    ]
    file = write_rows(*rows)
    with caplog.at_level(logging.WARNING):
        batch = batches(pairs(file, max_prompt_tokens=4, max_response_tokens=4))[0]
    assert [row["prompt"] for row in batch["rows"]] == ["a", "a", "b", "b"]
    assert [record.getMessage() for record in caplog.records if record.name.startswith("rlhf_lightning")] == [
        f"{file}: 3 of 5 rows dropped (1 with a prompt longer than data.max_prompt_tokens=4, "
        "1 with a response longer than data.max_response_tokens=4, 1 with the same response twice)"
    ]
    assert refused(write_rows(rows[3])).endswith("Give pairs that differ.")
    assert "has only 3 pairs to train. Try --data.batch_size 3." in refused(write_rows(*PAIRS), batch_size=4)


@pytest.mark.parametrize("workers", [0, 1])
def test_going_on_in_mid_epoch(write_rows: Writer, workers: int) -> None:
    file = write_rows(*PAIRS, *PAIRS, {"prompt": "e", "chosen": "i", "rejected": "j"})
    stops = range(6) if workers == 0 else range(1, 6, 2)
    assert_resumes(lambda: pairs(file, shuffle=True, num_workers=workers), stops=stops)


def test_conversations_end_in_the_answers(write_rows: Writer) -> None:
    rows = [
        {"prompt": "q", "chosen": conversation("q", "x"), "rejected": conversation("q", "y")},
        {"chosen": conversation("a", "b", "c", "x"), "rejected": conversation("a", "b", "c", "z")},
        {"prompt": conversation("q"), "chosen": conversation("", "x")[1:], "rejected": "w"},
    ]
    batch = batches(pairs(write_rows(*rows), chat_template=True, batch_size=3))[0]
    assert [row["prompt"] for row in batch["rows"][::2]] == [
        "<user>q<assistant>",
        "<user>a<assistant>b<eos><user>c<assistant>",
        "<user>q<assistant>",
    ]
    assert batch["response_ids"][:, 0].tolist() == [120, 121, 120, 122, 120, 119]
    other = {"chosen": conversation("a", "x"), "rejected": conversation("b", "y")}
    assert "the fields 'chosen' and 'rejected' hold different messages before their last" in refused(
        write_rows(other), chat_template=True
    )


def test_what_the_prompt_and_the_conversations_hold_stands_once(write_rows: Writer) -> None:
    system = {"role": "system", "content": "be brief"}
    question, call, result = conversation("q", "c", "r")
    named = {**question, "name": "someone"}
    chosen, rejected = conversation("", "x")[1], conversation("", "y")[1]
    rows = [
        {"prompt": prompt, "chosen": [*before, chosen], "rejected": [*before, rejected]}
        for prompt, before in (
            ([question], [call, result]),
            ([system, question], [named]),
            ([system], [system, question, call, result]),
            ([system, question], [call, result]),
            (" r\n", [question, call, result]),
            (None, [question]),
            ([question], [system, question]),
            ([result], [question, call, result]),
            ([{**question, "content": "q "}], [question, call, result]),
        )
    ]
    batch = batches(pairs(write_rows(*rows), chat_template=True, batch_size=9))[0]
    tools, brief = "<user>q<assistant>c<eos><user>r<assistant>", "<system>be brief"
    assert [row["prompt"] for row in batch["rows"][::2]] == [
        tools,
        f"{brief}<user>q<assistant>",
        f"{brief}{tools}",
        f"{brief}{tools}",
        tools,
        "<user>q<assistant>",
        f"{brief}<user>q<assistant>",
        tools,
        tools,
    ]
    for prompt in ("another", 3, [{"role": "user", "content": ["q"]}]):
        assert refused(write_rows(rows[0], {**rows[0], "prompt": prompt}), chat_template=True) == (
            f"FILE, row 2: the field 'prompt' holds {str(prompt)!r}, and none of the messages before the "
            "answer in 'chosen' says so. Give the prompt as messages whose contents are texts, or remove the "
            "field or the row."
        )


@pytest.mark.parametrize(
    "options",
    [{"prompt_field": "chosen"}, {"prompt_field": "rejected"}, {}],
    ids=["chosen", "rejected", "both"],
)
def test_no_answer_stands_in_the_prompt(write_rows: Writer, options: dict[str, object]) -> None:
    pair = {"chosen": conversation("a", "b", "c", "x"), "rejected": conversation("a", "b", "c", "z")}
    for whole in pair.values():
        row = pair if options else {**pair, "prompt": whole}
        (batch,) = batches(pairs(write_rows(row), chat_template=True, batch_size=1, **options))
        prompts = [row["prompt"] for row in batch["rows"]]
        assert prompts == ["<user>a<assistant>b<eos><user>c<assistant>"] * 2
        assert batch["response_ids"].tolist() == [[120, 258], [122, 258]]
    if options:
        assert "is named for the prompt and for an answer" in refused(write_rows(PAIRS[0]), **options)


def test_dialogues_are_split_after_their_last_shared_turn(write_rows: Writer) -> None:
    file = write_rows({"chosen": f"{DIALOGUE} d", "rejected": f"{DIALOGUE} e\n"})
    for options in ({}, {"dialogue": True}):
        batch = batches(pairs(file, batch_size=1, **options))[0]
        assert [row["prompt"] for row in batch["rows"]] == [DIALOGUE] * 2
        assert batch["response_ids"].tolist() == [[32, 100, 258, 256], [32, 101, 10, 258]]
    chat = batches(pairs(file, batch_size=1, chat_template=True))[0]
    assert chat["rows"][0]["prompt"] == "<user>a<assistant>b<eos><user>c<assistant>"
    assert chat["response_ids"].tolist() == [[100, 258], [101, 258]], "without the blanks around them"
    silent = write_rows({"chosen": f"{DIALOGUE} ", "rejected": f"{DIALOGUE} e"})
    assert batches(pairs(silent, batch_size=1, chat_template=True))[0]["response_ids"].tolist() == [
        [258, 256],
        [101, 258],
    ], "saying nothing is an answer"


def test_a_row_without_a_rejected_answer(write_rows: Writer) -> None:
    assert refused(write_rows(PAIRS[0], {"prompt": "a", "chosen": "b"})) == (
        "data.rejected_field=rejected: FILE, row 2 has no such field; it has: prompt, chosen. "
        "Correct or remove the row."
    )
    assert refused(write_rows({"prompt": "a", "chosen": "b", "reject": "c"})).endswith(
        "it has: prompt, chosen, reject. Try --data.rejected_field reject."
    )
    assert refused(write_rows({"chosen": "b", "rejected": "c"})) == (
        "data.prompt_field=prompt: FILE, row 1 has no such field; it has: chosen, rejected. Write the prompt "
        "into a field of its own."
    ), "these are no dialogues"
    assert refused(write_rows({"chosen": "b", "rejected": "c", "asked": "a"})).endswith(
        "it has: chosen, rejected, asked. Try --data.prompt_field asked."
    ), "no answer is advised as the prompt"
    assert refused(write_rows(PAIRS[0], {"prompt": "a", "chosen": "b", "rejected": None})) == (
        "FILE, row 2: the field 'rejected' holds None (NoneType); a response is a text, or a list of "
        "{role, content} messages, the assistant's last."
    )
    assert "row 1: the field 'chosen' holds 3 (int)" in refused(write_rows({**PAIRS[0], "chosen": 3}))
    assert refused(write_rows(PAIRS[0], {**PAIRS[0], "chosen": ""})) == (
        "FILE, row 2: the field 'chosen' holds an empty response. Remove the row."
    )
    assert "row 2: the prompt '' has no tokens" in refused(write_rows(PAIRS[0], {**PAIRS[0], "prompt": ""}))


@pytest.mark.parametrize(
    ("options", "row", "said"),
    [
        ({"margin_field": "by"}, {"by": "1"}, "the field 'by' holds '1' (str); this is a finite number."),
        ({"margin_field": "by"}, {"by": True}, "the field 'by' holds True (bool)"),
        ({"margin_field": "by"}, {"by": float("nan")}, "the field 'by' holds nan (float)"),
        ({"margin_field": "by"}, {}, "data.margin_field=by: FILE, row 2 has no such field"),
        (
            {"safe_fields": ("s0", "s1")},
            {"s0": True, "s1": 2},
            "the field 's1' holds 2 (int); this is true or",
        ),
        ({"safe_fields": ("s0", "s1")}, {"s0": True}, "data.safe_fields=s1: FILE, row 2 has no such field"),
    ],
)
def test_wrong_margins_and_labels(
    write_rows: Writer, options: dict[str, object], row: dict[str, object], said: str
) -> None:
    good = {**PAIRS[0], "by": 1, "s0": True, "s1": False}
    message = refused(write_rows(good, {**PAIRS[0], **row}), **options)
    assert said in message
    assert "FILE, row 2" in message


def test_a_prompt_is_answered_once(write_rows: Writer) -> None:
    def asked(data: RowData) -> list[str]:
        data.setup("predict")
        return [str(row["prompt"]) for batch in data.predict_dataloader() for row in batch["rows"]]

    file = write_rows(*PAIRS)
    assert asked(pairs(file)) == ["a", "bc", "d"]
    assert asked(pairs(file, val_rows=1)) == ["d"]
    both = UnpairedData(path=str(file), tokenizer="embedded", from_pairs=True, batch_size=2)
    assert asked(both) == ["a", "bc", "d"]
    held = list(both.predict_dataloader())
    assert [label for batch in held for label in batch["labels"].tolist()] == [True] * 3, "of the chosen"
    firsts = [ids[0] for batch in held for ids in batch["response_ids"].tolist()]
    assert firsts == [ord(pair["chosen"][0]) for pair in PAIRS]
    labelled = write_rows(*({"prompt": p, "response": "r", "label": 1} for p in "aab"))
    assert asked(UnpairedData(path=str(labelled), tokenizer="embedded", batch_size=2)) == ["a", "a", "b"]


@pytest.mark.skipif(not DATA.is_dir(), reason="the folder shared/data beside the checkout is absent")
@pytest.mark.parametrize(("chat", "limit"), [(False, 800), (True, 200)], ids=["plain", "chat"])
def test_real_dialogues(chat: bool, limit: int, caplog: pytest.LogCaptureFixture) -> None:
    file = DATA / "hh_harmless_base_test.jsonl.gz"
    fits = {"max_prompt_tokens": 4000, "max_response_tokens": 2500}
    with caplog.at_level(logging.WARNING):
        data = pairs(file, chat_template=chat, limit=limit, batch_size=16, **fits)
        batch = batches(data)[0]
    assert "dropped" not in caplog.text
    assert len(data.train_rows) == 2 * limit
    assert batch["response_ids"].shape[0] == 32
    prompts = [str(row["prompt"]) for row in data.train_rows]
    asked, answers = ("<user>", "<assistant>") if chat else ("\n\nHuman:", "\n\nAssistant:")
    assert all(prompt.startswith(asked) and prompt.endswith(answers) for prompt in prompts)
    for row, ids, mask in zip(batch["rows"], batch["response_ids"], batch["response_mask"], strict=True):
        text = bytes(ids[mask][:-1].tolist()).decode()
        assert any(str(row[side]).endswith(text) for side in ("chosen", "rejected"))
        if not chat:
            assert any(f"{row['prompt']}{text}" == row[side] for side in ("chosen", "rejected"))
