"""The task that needs no file, and those of reasoning-gym."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlhf_lightning.data import ReasoningGymData, TaskData
from rlhf_lightning.data.tasks import sort_digits
from rlhf_lightning.rewards import RewardSpec, preflight, score


def ready(data: TaskData | ReasoningGymData) -> TaskData | ReasoningGymData:
    data.setup("fit")
    return data


def test_a_row_is_a_function_of_seed_and_index() -> None:
    row = sort_digits(3, 5)
    assert row == sort_digits(3, 5)
    assert row not in (sort_digits(3, 6), sort_digits(4, 5))
    digits = str(row["prompt"]).removeprefix("Sort ").removesuffix(": ")
    assert len(digits) == 6
    assert row["answer"] == "".join(sorted(digits))


def test_held_out_digits_are_never_trained_on() -> None:
    train = {str(sort_digits(0, index, digits=(2, 2))["prompt"]) for index in range(2000)}
    for seed in range(3):
        held_out = {
            str(sort_digits(seed, index, digits=(2, 2), held_out=True)["prompt"]) for index in range(50)
        }
        assert not train & held_out
    assert len(train) > 80


def test_task_data_with_and_without_completions() -> None:
    options = {"tokenizer": "embedded", "num_rows": 40, "num_val_rows": 7, "batch_size": 16, "max_digits": 8}
    data = ready(TaskData(**options))  # type: ignore[arg-type]
    batch = next(iter(data.train_dataloader()))
    assert "response_ids" not in batch
    assert batch["prompt_mask"].sum(1).tolist() == [len(str(row["prompt"])) for row in batch["rows"]]
    assert len(data.held_out_rows) == 7
    completed = next(iter(ready(TaskData(**options, completions=True)).train_dataloader()))  # type: ignore[arg-type]
    assert completed["rows"] == batch["rows"]
    for ids, mask, row in zip(
        completed["response_ids"], completed["response_mask"], completed["rows"], strict=True
    ):
        assert ids[mask].tolist() == [*str(row["answer"]).encode(), 258]


def test_task_data_refuses_impossible_ranges() -> None:
    with pytest.raises(ValueError, match=r"min_digits=1"):
        TaskData(min_digits=1)
    with pytest.raises(ValueError, match=r"min_digits=7, data\.max_digits=6"):
        TaskData(min_digits=7)
    with pytest.raises(ValueError, match=r"num_rows=0"):
        TaskData(num_rows=0)


def test_reasoning_gym_rows_and_their_verifier() -> None:
    pytest.importorskip("reasoning_gym")
    options = {"tokenizer": "embedded", "num_rows": 20, "num_val_rows": 5, "batch_size": 4}
    data = ready(ReasoningGymData(task="spell_backward", options={"max_word_len": 5}, **options))  # type: ignore[arg-type]
    rows = data.train_rows[:2]
    assert all(row["data_source"] == "spell_backward" for row in rows)
    assert rows == ready(ReasoningGymData(options={"max_word_len": 5}, **options)).train_rows[:2]  # type: ignore[arg-type]
    prompts = [str(row["prompt"]) for row in rows]
    responses = [f" {rows[0]['answer']}\n", "wrong"]
    scores = score(RewardSpec(functions="reasoning_gym"), prompts, responses, rows)["scores"]
    assert scores[0] == 1.0
    assert scores[1] < 0.5


@pytest.mark.parametrize(
    ("task", "options", "off"),
    [
        ("word_ladder", {"min_word_length": 3, "max_word_length": 3}, lambda answer: f"{answer},{answer}"),
        (
            "decimal_arithmetic",
            {"min_num_decimal_places": 9, "max_num_decimal_places": 9},
            lambda answer: str(float(answer) + 0.0005),
        ),
    ],
    ids=["words of three letters, by default four", "nine decimal places, by default three"],
)
def test_reasoning_gym_verifies_with_the_options_of_the_data(
    task: str, options: dict[str, int | float | bool | str], off: Callable[[str], str]
) -> None:
    pytest.importorskip("reasoning_gym")
    data = ready(ReasoningGymData(task=task, options=options, tokenizer="embedded", num_rows=1, batch_size=1))
    row, answer = data.train_rows[0], str(data.train_rows[0]["answer"])
    preflight(spec := RewardSpec(functions="reasoning_gym"), [row])
    scores = score(spec, [str(row["prompt"])] * 2, [answer, off(answer)], [row, row])["scores"]
    assert scores == [1.0, 0.0]


def test_options_are_advised_where_there_are_some() -> None:
    data = ready(TaskData(completions=True, tokenizer="embedded", num_rows=32))
    with pytest.raises(ValueError, match=r"the model has 9 positions\. Drop what is longer\.$"):
        data.check_lengths(positions=9, new_tokens=1, generates=False)
    with pytest.raises(ValueError, match=r"has 9 positions\. Try shorter prompts\.$"):
        data.check_lengths(positions=9, new_tokens=1, generates=True)


def test_reasoning_gym_rows_held_out_are_never_trained_on() -> None:
    pytest.importorskip("reasoning_gym")
    short: dict[str, int | float | bool | str] = {"min_word_len": 3, "max_word_len": 3}
    data = ready(ReasoningGymData(options=short, tokenizer="embedded", num_rows=300, num_val_rows=300))
    trained = {row["prompt"] for row in data.train_rows}
    held_out = {row["prompt"] for row in data.held_out_rows}
    assert len(data.train_rows) == 300
    assert not trained & held_out
    assert len(data.held_out_rows) < 300, "there are few words of three letters"


def test_reasoning_gym_refuses_unknown_tasks_and_options() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(
        ValueError, match=r"data\.task=spel: reasoning-gym has no such task; it has: .*spell_backward"
    ):
        ready(ReasoningGymData(task="spel", tokenizer="embedded"))
    with pytest.raises(ValueError, match=r"the task spell_backward refuses them"):
        ready(ReasoningGymData(options={"colour": 3}, tokenizer="embedded"))
    with pytest.raises(ValueError, match=r"the task spell_backward refuses them"):
        ready(ReasoningGymData(options={"min_word_len": 9, "max_word_len": 3}, tokenizer="embedded"))


@pytest.mark.parametrize(("num_rows", "num_val_rows"), [(0, 0), (8, -5)])
def test_reasoning_gym_refuses_impossible_numbers(num_rows: int, num_val_rows: int) -> None:
    with pytest.raises(ValueError, match=r"at least 1 training row and no negative number"):
        ReasoningGymData(num_rows=num_rows, num_val_rows=num_val_rows)


def test_reasoning_gym_refuses_a_template_without_the_question() -> None:
    with pytest.raises(ValueError, match=r"^data\.prompt_template='Q:': it has no \{prompt\}"):
        ReasoningGymData(prompt_template="Q:")
