"""PromptData: batches, formats of prompts, what is dropped and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch

from rlhf_lightning.data import PromptData, RowBatch
from rlhf_lightning.data.sampler import HELD_OUT
from rlhf_lightning.data.tokenizer import tokenize
from tests.embedded_model import build_byte_tokenizer
from tests.unit.data.conftest import Writer, prompt_data
from tests.unit.rlhf import Rlhf

DATA = Path(__file__).parents[3].parent / "shared" / "data"


def batches(data: PromptData) -> list[RowBatch]:
    return list(data.train_dataloader())


def test_what_is_written_into_a_batch_stays_out_of_the_data(write_rows: Writer) -> None:
    data = prompt_data(write_rows({"prompt": "ab"}), batch_size=1)
    (batch,) = batches(data)
    assert "group_ids" not in batch, "no two rows belong together"
    batch["rows"][0]["prompt"] = "changed"
    assert [row["prompt"] for again in batches(data) for row in again["rows"]] == ["ab"]


def test_many_texts_are_tokenised_in_order() -> None:
    """In pieces of 1,024."""
    texts = [chr(65 + number % 26) for number in range(2100)]
    found = tokenize(texts, build_byte_tokenizer(), special=False)
    assert [ids.tolist() for ids in found] == [[ord(text)] for text in texts]


def test_batch_is_left_padded_and_keeps_the_rows(write_rows: Writer) -> None:
    file = write_rows(
        {"prompt": "ab", "answer": 1}, {"prompt": "abcd", "data_source": "mine"}, {"prompt": "é"}
    )
    first, last = batches(prompt_data(file, shuffle=False))
    assert first["prompt_ids"].tolist() == [[256, 256, 97, 98], [97, 98, 99, 100]]
    assert first["prompt_mask"].tolist() == [[False, False, True, True], [True] * 4]
    assert first["prompt_mask"].dtype == torch.bool
    assert first["row_ids"].tolist() == [0, 1]
    assert first["rows"] == [
        {"prompt": "ab", "answer": 1, "data_source": "train"},
        {"prompt": "abcd", "data_source": "mine"},
    ]
    assert last["prompt_ids"].tolist() == [[195, 169]], (
        "the last batch is smaller, and as wide as its longest prompt"
    )


def test_row_ids_are_unique_over_epochs_and_held_out_rows(numbered: Callable[[int], Path]) -> None:
    data = prompt_data(numbered(9), val_rows=3)
    loader = data.train_dataloader()
    ids = [key for _ in range(2) for batch in loader for key in batch["row_ids"].tolist()]
    held_out = [key for batch in data.val_dataloader()[0] for key in batch["row_ids"].tolist()]
    assert held_out == [HELD_OUT, HELD_OUT + 1, HELD_OUT + 2]
    assert len(set(ids + held_out)) == 6 + 6 + 3
    assert [row["prompt"] for row in data.held_out_rows] == ["p6", "p7", "p8"]


@pytest.mark.parametrize("consumed", range(9))
def test_loader_goes_on_in_mid_epoch_and_over_its_end(numbered: Callable[[int], Path], consumed: int) -> None:
    file = numbered(10)  # 4 batches of 3, 3, 3 and 1 an epoch
    straight = prompt_data(file, batch_size=3).train_dataloader()
    expected = [batch["row_ids"].tolist() for _ in range(3) for batch in straight]
    stopped = prompt_data(file, batch_size=3).train_dataloader()
    taken: list[RowBatch] = []
    while len(taken) < consumed:
        taken += islice(stopped, consumed - len(taken))
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = prompt_data(file, batch_size=3).train_dataloader()
    resumed.load_state_dict(state)
    rest = [batch["row_ids"].tolist() for _ in range(4) for batch in resumed]
    got = [batch["row_ids"].tolist() for batch in taken] + rest
    assert got[: len(expected)] == expected


def test_a_run_that_stops_again_goes_on_from_there(numbered: Callable[[int], Path]) -> None:
    file = numbered(10)
    straight = prompt_data(file, batch_size=3).train_dataloader()
    expected = [batch["row_ids"].tolist() for _ in range(2) for batch in straight]
    got: list[list[int]] = []
    state: dict[str, object] | None = None
    for _ in range(6):
        loader = prompt_data(file, batch_size=3).train_dataloader()
        if state is not None:
            loader.load_state_dict(state)
        got.append(next(iter(loader))["row_ids"].tolist())
        state = loader.state_dict()
    assert got == expected[:6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4}, r"data\.batch_size=4: .* begun with 3\. Resume with --data\.batch_size 3\."),
        ({"num_workers": 1}, r"data\.num_workers=1: .*Resume with --data\.num_workers 0"),
        ({"shuffle": False}, r"data\.shuffle=false: .*Resume with --data\.shuffle true"),
        ({"val_rows": 2}, "in the middle of 10 rows, the data has 8 now"),
    ],
)
def test_what_would_repeat_or_skip_rows_is_refused_when_the_state_comes(
    numbered: Callable[[int], Path], options: dict[str, object], message: str
) -> None:
    file = numbered(10)
    stopped = prompt_data(file, batch_size=3).train_dataloader()
    next(iter(stopped))
    resumed = prompt_data(file, **{"batch_size": 3, **options}).train_dataloader()
    with pytest.raises(ValueError, match=message):
        resumed.load_state_dict(stopped.state_dict())


def test_lengths_are_those_of_held_out_prompts_and_their_answers_too(write_rows: Writer) -> None:
    file = write_rows({"prompt": "ab"}, {"prompt": "ab"}, {"prompt": "abcd"})
    data = prompt_data(file, batch_size=1, val_rows=1)
    assert (data.prompt_lengths, data.longest_prompt) == ([2, 2], 4)
    data.check_lengths(positions=7, new_tokens=3, generates=False)
    with pytest.raises(ValueError, match=r"^sampling\.max_new_tokens=4: with the longest prompt, 4 tokens"):
        data.check_lengths(positions=7, new_tokens=4, generates=False)


def test_states_that_say_less_are_taken(numbered: Callable[[int], Path]) -> None:
    stopped = prompt_data(numbered(10), batch_size=3).train_dataloader()
    next(iter(stopped))
    said = ("num_workers", "batch_size", "order")
    resumed = prompt_data(numbered(10), batch_size=3).train_dataloader()
    resumed.load_state_dict({name: x for name, x in stopped.state_dict().items() if name not in said})
    assert len(list(resumed)) == 3


def test_prompts_of_dialogues(write_rows: Writer) -> None:
    file = write_rows({"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"})
    options = {"prompt_field": "chosen", "dialogue": True, "batch_size": 1}
    plain = prompt_data(file, **options).train_rows[0]["prompt"]
    assert plain == "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    chat = prompt_data(file, **options, chat_template=True).train_rows[0]["prompt"]
    assert chat == "<user>a<assistant>b<eos><user>c<assistant>"
    with pytest.raises(ValueError, match=r"row 1: 'a' is not a dialogue"):
        prompt_data(write_rows({"chosen": "a"}), **options)
    with pytest.raises(ValueError, match=r"the field 'chosen' holds 3 \(int\); a dialogue is a text"):
        prompt_data(write_rows({"chosen": 3}), **options)


@pytest.mark.parametrize("prompt", [None, 3, [], {"role": "user"}])
def test_prompt_that_is_no_prompt(write_rows: Writer, prompt: object) -> None:
    file = write_rows({"prompt": "ok"}, {"prompt": prompt})
    with pytest.raises(
        ValueError, match=r"train\.jsonl, row 2: the field 'prompt' holds .*a prompt is a text or"
    ):
        prompt_data(file, chat_template=True)


def test_long_rows_are_counted_and_dropped(write_rows: Writer, caplog: pytest.LogCaptureFixture) -> None:
    file = write_rows(*({"prompt": "x" * n} for n in (1, 5, 2, 6, 4)))
    with caplog.at_level(logging.WARNING):
        data = prompt_data(file, max_prompt_tokens=4)
    assert [row["prompt"] for row in data.train_rows] == ["x", "xx", "xxxx"]
    assert [record.getMessage() for record in caplog.records if record.name.startswith("rlhf_lightning")] == [
        f"{file}: 2 of 5 rows dropped (2 with a prompt longer than data.max_prompt_tokens=4)"
    ]
    with pytest.raises(ValueError, match=r"none of the 5 rows fits .*the shortest prompt has 1 tokens"):
        prompt_data(file, max_prompt_tokens=0)


def test_row_without_the_prompt_field(write_rows: Writer) -> None:
    """In the first row another is advised; in a later one the rows before it have the one of the option."""
    row = {"question": "b", "answer": "c"}
    instead = {1: "Try --data.prompt_field question.", 2: "Correct or remove the row."}
    for number, advice in instead.items():
        file = write_rows(*[{"prompt": "a"}] * (number - 1), row)
        with pytest.raises(ValueError, match="no such field") as error:
            prompt_data(file)
        assert str(error.value) == (
            f"data.prompt_field=prompt: {file}, row {number} has no such field; "
            f"it has: question, answer. {advice}"
        )


def test_a_field_that_no_row_has_is_a_wrong_option(write_rows: Writer) -> None:
    """Only the first row is looked at, so it may also be the one that is wrong."""
    file = write_rows(*[{"prompt": "a", "target": "b"}] * 2)
    with pytest.raises(ValueError, match="no such field") as error:
        prompt_data(file, answer_field="solution")
    assert str(error.value) == (
        f"data.answer_field=solution: {file}, row 1 has no such field; it has: prompt, target. "
        "Type one of these as --data.answer_field, or correct the row."
    )


def test_fields_of_objects(write_rows: Writer) -> None:
    """As data sets for verl have the answer."""
    rows = [
        {"prompt": "a", "answer": "not this", "reward_model": {"ground_truth": "3", "style": "rule"}},
        {"a.b": "x", "a": {"b": "y"}, "prompt": "b", "reward_model": {"ground_truth": 4}},
    ]
    file = write_rows(*rows)
    data = prompt_data(file, answer_field="reward_model.ground_truth")
    assert [row["answer"] for row in data.train_rows] == ["3", 4]
    assert [row["reward_model"] for row in data.train_rows] == [row["reward_model"] for row in rows]
    styled = prompt_data(file, data_source_field="reward_model.style")
    assert [row["data_source"] for row in styled.train_rows] == ["rule", "train"]
    assert prompt_data(write_rows(*rows[1:]), prompt_field="a.b", batch_size=1).train_rows[0]["prompt"] == "x"
    for field in ("reward_model.truth", "reward_model.style.a", "ground_truth"):
        with pytest.raises(ValueError, match=rf"data\.answer_field={field}: .*, row 1 has no such field"):
            prompt_data(write_rows(*rows), answer_field=field)
    with pytest.raises(
        ValueError, match=r"the field .reward_model\.ground_truth. holds .*a prompt is a text"
    ):
        prompt_data(
            write_rows({"reward_model": {"ground_truth": 3}}), prompt_field="reward_model.ground_truth"
        )


def test_prompt_without_tokens(write_rows: Writer) -> None:
    with pytest.raises(ValueError, match="row 2: the prompt '' has no tokens"):
        prompt_data(write_rows({"prompt": "a"}, {"prompt": ""}))


def test_options_that_do_not_fit_the_data(numbered: Callable[[int], Path]) -> None:
    file = numbered(5)
    with pytest.raises(ValueError, match=r"data\.batch_size=6: .*has only 5 rows.*--data\.batch_size 5"):
        prompt_data(file, batch_size=6)
    with pytest.raises(ValueError, match=r"data\.val_rows=5: .*has 5 rows"):
        prompt_data(file, val_rows=5)
    assert len(prompt_data(file, limit=3).train_rows) == 3
    assert len(prompt_data(file, limit=2, val_rows=2).held_out_rows) == 2
    assert len(prompt_data(file, val_path=str(file)).held_out_rows) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"data\.batch_size=0"),
        ({"seed": -1}, r"data\.seed=-1"),
        ({"val_rows": -1}, r"data\.val_rows=-1"),
        ({"val_rows": 1, "val_path": "x"}, "give one of the two"),
        ({"limit": 0}, r"data\.limit=0"),
        ({"num_workers": -1}, r"data\.num_workers=-1"),
        ({"prompt_template": "Q:"}, "has no {prompt}"),
        ({"prompt_template": None}, r"data\.prompt_template=None: has to be of type str"),
        ({"answer_field": None}, r"data\.answer_field=None: has to be of type str"),
        ({"data_source_field": None}, r"data\.data_source_field=None: has to be of type str"),
    ],
)
def test_options_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptData(path="x.jsonl", **options)  # type: ignore[arg-type]


def test_no_tokenizer_to_be_found(numbered: Callable[[int], Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Try --data\.tokenizer embedded"):
        prompt_data(numbered(3), tokenizer=None)
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        prompt_data(numbered(3), tokenizer=str(tmp_path))


@pytest.mark.skipif(not DATA.is_dir(), reason="the folder shared/data beside the checkout is absent")
def test_real_questions() -> None:
    file = DATA / "gsm8k_train.jsonl"
    data = prompt_data(file, prompt_field="question", limit=200, batch_size=16, max_prompt_tokens=300)
    batch = batches(data)[0]
    assert batch["prompt_ids"].shape[0] == 16
    assert all(str(row["answer"]).count("####") == 1 for row in batch["rows"])
    assert {row["data_source"] for row in batch["rows"]} == {"gsm8k_train"}
    lengths = [len(str(row["question"]).encode()) for row in batch["rows"]]
    assert batch["prompt_mask"].sum(1).tolist() == lengths


def test_the_rest_of_an_epoch_can_be_left_out(write_rows: Writer) -> None:
    file = write_rows(*({"prompt": str(n)} for n in range(7)))
    assert [len(batch["rows"]) for batch in batches(prompt_data(file, batch_size=3))] == [3, 3, 1]
    assert [len(batch["rows"]) for batch in batches(prompt_data(file, batch_size=3, drop_last=True))] == [
        3,
        3,
    ]


@pytest.mark.parametrize(
    ("rows", "drop_last", "shuffle", "lost"),
    [
        (7, True, False, "the last 1 of the 7 rows of"),
        (8, True, False, "the last 2 of the 8 rows of"),
        (7, True, True, ""),
        (7, False, False, ""),
        (6, True, False, ""),
    ],
)
def test_rows_that_no_epoch_would_draw_are_told_of(
    rows: int,
    drop_last: bool,
    shuffle: bool,
    lost: str,
    *,
    write_rows: Writer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = str(write_rows(*({"prompt": str(n)} for n in range(rows))))
    data = PromptData(path=path, tokenizer="embedded", batch_size=3, drop_last=drop_last, shuffle=shuffle)
    with caplog.at_level(logging.WARNING):
        data.setup("predict")
        assert not caplog.records
        data.setup("fit")
    assert [lost in record.getMessage() for record in caplog.records] == [True] * bool(lost)
    assert ("data.drop_last=true with shuffle=false: every epoch leaves out" in caplog.text) == bool(lost)


def test_fewer_rows_than_a_batch_are_enough_to_answer(write_rows: Writer) -> None:
    file = write_rows({"prompt": "a"}, {"prompt": "b"})
    data = PromptData(path=str(file), tokenizer="embedded", batch_size=3)
    data.setup("predict")
    (batch,) = data.predict_dataloader()
    assert len(batch["rows"]) == 2
    with pytest.raises(ValueError, match=r"data\.batch_size=3: .* has only 2 rows to train"):
        data.setup("fit")


def test_a_template_with_a_colon_is_quoted_twice(
    rlhf: Rlhf, write_rows: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(write_rows({"prompt": "a"}, {"prompt": "b"}))
    words = ("fit", "--algo", "grpo", "--data", "promptdata", "--data.path", file, "--data.batch_size", "3")
    said = rlhf.refused(*words, "--data.prompt_template", "Question: {prompt}")
    assert "It was read as YAML, in which colons and brackets mean something: quote the text twice" in said
    assert "has only 2 rows" in rlhf.refused(*words, "--data.prompt_template", '"Question: {prompt}"')
