r"""maths_answer: finding the final answer, and whether it is right."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhf_lightning.data.rows import read_rows
from rlhf_lightning.rewards.maths import final_answer, maths_answer, same_answer

pytest.importorskip("math_verify")
DATA = Path(__file__).parents[3].parent / "shared" / "data"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"first 7, then \boxed{8}, 9 left", "8"),
        ("48/2 = 24\n#### 72", "72"),
        ("#### 1\nwait\n#### $1,000\nbye 3", "$1,000"),
        ("#### 72 clips", "72"),
        ("#### $1,234.50 per week", "$1,234.50"),
        ("#### 72. It is 48 + 24", "72"),
        ("#### 72 (48+24)", "72"),
        ("#### **-72 \u00e9toiles**", "-72"),
        ("#### \u221272 clips", "\u221272"),
        ("so x is \u22125.", "\u22125"),
        ("#### 2 x + 1", "2 x + 1"),
        ("#### 2 pi", "2 pi"),
        ("#### 2 and 3", "2 and 3"),
        ("#### 5 million euros", "5 million euros"),
        ("#### 5 dozens of eggs", "5 dozens of eggs"),
        ("#### 5 plus 3", "5 plus 3"),
        ("#### 5 squared", "5 squared"),
        ("#### 2, 3", "2, 3"),
        (r"#### 2 \pi", r"2 \pi"),
        ("it is 3, no, -4.5 euros.", "-4.5"),
        ("They sold 1,234 of 5.", "5"),
        ("about 3/4", "3/4"),
        ("about -1 1/2 cups.", "-1 1/2"),
        ("in 2020 1/2 of them", "1/2"),
        ("in 1,234.", "1,234"),
        ("none at all", None),
        ("", None),
        (r"unfinished \boxed{12", "12"),
    ],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("72", "72", True),
        ("72", "72.0", True),
        ("72", "73", False),
        ("1,000", "1000", True),
        ("1000", "$1,000.", True),
        ("-1,234", "-1234", True),
        ("1,234", "1,235", False),
        ("(1,234)", "(1, 234)", True),
        ("(1,234)", "1234", False),
        ("1{,}000", "1000", True),
        ("0.5", "1/2", True),
        ("1/3", "0.333", False),
        ("-3", "3", False),
        ("-3", "\u22123", True),
        ("1/0", "2", False),
        ("1.5", "1 1/2", True),
        ("-1 1/2", "-3/2", True),
        (r"1\frac{1}{2}", "1 1/2", True),
        ("1 1/2", "1/2", False),
        ("1 1/0", "1", False),
        (r"\frac{1}{2}", "0.5", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("x^2+2x+1", "(x+2)^2", False),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("72", "", False),
        ("72", "seventy-two", False),
    ],
)
def test_same_answer(gold: str, answer: str, same: bool) -> None:
    assert same_answer(gold, answer) == same


COSTLY = [
    "9^{9^{9^{9}}}",
    "9^9^9^9",
    "9**9**9**9",
    "10^{99999999999}",
    "(((9^{999})^{999})^{999})^{999}",
    "99999!",
    "((9!)!)!",
    r"\sum_{i=1}^{99999999} i^{9}",
    r"\int_0^{\infty} e^{-x^x} dx",
    "1" * 500,
    "9^" * 80 + "9",
    "9^{(9^{99})}",
    "9^{(9)}^{9^9}",
    "(x+y+z)^{99}",
    "(x+1)^{9999}",
    r"\Gamma(999999999)",
    "1E999999999",
    r"\sqrt[3]{1.5E-999999999}",
    r"\binom{999999999}{99999999}",
    r"\dbinom{{10^9}}{10^8}",
    r"\exp(9876543210)",
    r"e^{\exp(30)}",
]


@pytest.mark.parametrize("answer", COSTLY)
def test_endless_answers_are_wrong_at_once(answer: str) -> None:
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:  # outside the main thread there is no time-out to help
        assert not pool.submit(same_answer, "3.5", answer).result()
    assert time.monotonic() - start < 5, "even on a busy machine"


def test_scores_in_and_outside_the_main_thread() -> None:
    rows: list[dict[str, object]] = [
        {"answer": "6*2 = <<6*2=12>>12\n#### 12"},
        {"answer": r"\frac{2}{4}"},
        {"answer": "5"},
        {"answer": "72"},
    ]
    responses = ["I think 11, no, #### 12", r"clearly \boxed{\frac{1}{2}}", "no idea", "#### 72 clips"]
    expected = [1.0, 1.0, 0.0, 1.0]
    assert maths_answer([""] * 4, responses, rows) == expected
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(maths_answer, [""] * 4, responses, rows).result() == expected


@pytest.mark.skipif(not DATA.is_dir(), reason="the folder shared/data beside the checkout is absent")
def test_every_real_answer_scores_itself() -> None:
    rows = read_rows(str(DATA / "gsm8k_train.jsonl"))
    answers = [str(row["answer"]) for row in rows]
    assert sum(maths_answer([""] * len(rows), answers, rows)) == len(rows)
    boxed = [rf"so it is \boxed{{{answer.rpartition('#### ')[2]}}}" for answer in answers]
    assert sum(maths_answer([""] * len(rows), boxed, rows)) == len(rows)
    shifted = answers[1:] + answers[:1]
    wrong = sum(maths_answer([""] * len(rows), shifted, rows)) / len(rows)
    assert wrong < 0.05
