"""The reward functions that come with the package, and what is no name of one."""

from __future__ import annotations

import pytest

from rlhf_lightning.rewards import resolve


def run(name: str, responses: list[str], **fields: object) -> list[float]:
    scores = resolve(name)([""] * len(responses), responses, [dict(fields) for _ in responses])
    assert isinstance(scores, list)
    return scores


def test_exact_match_ignores_white_space_around() -> None:
    assert run("exact_match", ["12", " 12\n", "1 2", "", "012"], answer=" 12") == [1, 1, 0, 0, 0]
    assert run("exact_match", ["12"], answer=12) == [1]


def test_partial_match_counts_positions() -> None:
    assert run("partial_match", ["1234", "1243", "12", "123456", "", " 1234"], answer="1234") == [
        1,
        0.5,
        0.5,
        pytest.approx(4 / 6),
        0,
        1,
    ]


def test_length_saturates() -> None:
    assert run("length", ["", "x" * 64, "x" * 999]) == [0, 0.25, 1]


def test_too_long_is_a_cost() -> None:
    assert run("too_long", ["1234", "12345", " 1234\n", "", "xxxxx"], answer=" 1234") == [0, 1, 0, 0, 1]


def test_repetition_is_the_share_of_pieces_that_were_there_before() -> None:
    responses = ["", "abc", "abcd", "abcdabcd", "aaaaaaaa", "123456123", "no word of it"]
    assert run("repetition", responses) == [0, 0, 0, pytest.approx(1 / 5), 1 - 1 / 5, 0, 0]


@pytest.mark.parametrize("name", ["exact_match", "partial_match", "maths_answer", "too_long"])
def test_row_without_an_answer(name: str) -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(
        ValueError,
        match=f"{name} compares with the row's field 'answer', this row has: question, prompt; its prompt "
        "begins 'the prompt'. Name the field that holds it by --data.answer_field, or use another",
    ):
        run(name, ["x"], question="q", prompt="the prompt")
    with pytest.raises(ValueError, match=r"this row has: prompt, answer \(null\); its prompt"):
        run(name, ["None"], prompt="the prompt", answer=None)
    with pytest.raises(ValueError, match=r"--data\.answer_field reward_model\.ground_truth, or use another"):
        run(name, ["x"], extra_info={"index": 3}, reward_model={"style": "rule", "ground_truth": "3"})


def test_a_file_is_no_function() -> None:
    for name, meant in (("./at/home.py", "at.home.myfunction"), ("at/home.py:all", "at.home.all")):
        with pytest.raises(
            ValueError, match=rf"'{name}': it is a file\. Give the dotted .* such as {meant}\.$"
        ):
            resolve(name)
