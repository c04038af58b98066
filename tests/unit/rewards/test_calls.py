"""How functions of rewards and environments are called, and what they may return."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import Tensor

from rlhf_lightning.rewards import Environment, RewardFunction, RewardSpec, preflight, score
from rlhf_lightning.rewards.score import tried_rows

if TYPE_CHECKING:
    from rlhf_lightning.rewards.environment import ReplyFunction

Row = dict[str, object]
SHARED: Row = {"prompt": "2 + 3 = ", "answer": "5", "data_source": "sums", "seen": []}
"""All answers to one prompt share its row."""


def parsed(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """Notes in each row what was said, takes the answer away, and reads both afterwards."""
    for response, row in zip(responses, rows, strict=True):
        row["parsed"] = response.strip(), row.pop("answer")
        seen = row["seen"]
        assert isinstance(seen, list)
        seen.append(response)
    return [float(row["parsed"] == ("5", "5") and row["seen"] == [row["parsed"][0]]) for row in rows]


def told(prompts: list[str], responses: list[str], rows: list[Row]) -> list[str | None]:
    """The same of an environment."""
    return [None if right else "no" for right in parsed(prompts, responses, rows)]


def test_a_function_may_write_into_the_rows_of_answers_to_one_prompt() -> None:
    responses, prompts = ["5", "6", "5", "7"], [str(SHARED["prompt"])] * 4
    spec = RewardSpec(functions={parsed: 1.0, "exact_match": 1.0})
    for _ in range(2):
        assert score(spec, prompts, responses, [SHARED] * 4)["scores"] == [2, 0, 2, 0]
        told_of = Environment(function=told).replies(prompts, responses, [SHARED] * 4)
        assert told_of == [None, "no", None, "no"]
    assert SHARED["seen"] == []
    assert "parsed" not in SHARED


def times(scale: float, prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """As long as it is, times a number."""
    return [scale * len(response) for response in responses]


TWICE = partial(times, 2.0)


def test_a_function_that_a_call_makes_is_named_by_its_variable() -> None:
    with pytest.raises(ValueError, match=r"of one that a call makes give the path of the variable .*there"):
        RewardSpec(functions=TWICE)
    spec = RewardSpec(functions=f"{__name__}.TWICE")
    assert score(spec, ["a", "b"], ["yes", "no"], [{}, {}])["scores"] == [6.0, 4.0]


def test_a_function_of_a_file_that_was_run_is_told_to_stand_in_a_module(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine(prompts, responses, rows): return [None] * len(rows)\n")
    told = r"^environment\.function: <function mine .*> is not under its name at the top of a module, so"
    with pytest.raises(ValueError, match=told):
        Environment(function=runpy.run_path(str(file))["mine"])


def fails_in_the_middle(prompts: list[str], responses: list[str], rows: list[Row]) -> Iterator[float]:
    """Is a generator, which runs as it is read."""
    yield from (1 / int(response) for response in responses)


def leaves_in_the_middle(prompts: list[str], responses: list[str], rows: list[Row]) -> Iterator[float]:
    """The same, that ends the process."""
    yield from (float(response) or sys.exit(3) for response in responses)


def one_for_all(prompts: list[str], responses: list[str], rows: list[Row]) -> Tensor:
    """The mean of a batch."""
    return torch.tensor(0.5)


def two_for_each(prompts: list[str], responses: list[str], rows: list[Row]) -> Tensor:
    """Scores of two kinds."""
    return torch.zeros(len(rows), 2)


def no_real_number(prompts: list[str], responses: list[str], rows: list[Row]) -> Tensor:
    """Complex numbers, as of a spectrum."""
    return torch.full((len(rows),), 1j)


def bytes_of_digits(prompts: list[str], responses: list[str], rows: list[Row]) -> list[bytes]:
    """What a service said, not read as numbers."""
    return [response.encode() for response in responses]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (fails_in_the_middle, "ZeroDivisionError over 2 rows, the first with the prompt .*zero"),
        (leaves_in_the_middle, "SystemExit over 2 rows, the first with the prompt '2"),
        (one_for_all, "TypeError over 2 rows, the first with the prompt .* 0-d tensor"),
        (two_for_each, r"row 0 of the batch got tensor\(\[0\., 0\.\]\), which is not a finite number"),
        (bytes_of_digits, "row 0 of the batch got b'1', which is not a finite number"),
        (no_real_number, r"row 0 of the batch got tensor\(.*j\), which is not a finite number"),
    ],
)
def test_what_fails_as_scores_are_read_is_named(function: RewardFunction, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^reward function tests\.unit\.rewards\.test_calls\.\w+: {words}"):
        score(RewardSpec(functions=function), [str(SHARED["prompt"])] * 2, ["1", "0"], [SHARED] * 2)


def one_text(prompts: list[str], responses: list[str], rows: list[Row]) -> list[str | None]:
    """Forgets the list, with as many letters as there are rows."""
    return cast("list[str | None]", "no")


def by_response(prompts: list[str], responses: list[str], rows: list[Row]) -> list[str | None]:
    """Replies by what was said."""
    return cast("list[str | None]", dict.fromkeys(responses, "no"))


def one_for_several(prompts: list[str], responses: list[str], rows: list[Row]) -> list[str | None]:
    """A reply to the whole batch."""
    return [None]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (one_text, r"'no', of type str, the first with the prompt '2 .* Return a list of one text for each"),
        (by_response, r"\{'1': 'no', '0': 'no'\}, of type dict, .* Return a list"),
        (one_for_several, r"a list of 1 for 2 rows, .* Return one text for each response, or None where it"),
    ],
)
def test_replies_that_are_no_list_for_the_rows_are_refused(function: ReplyFunction, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^environment tests\.unit\..*\.\w+: returned {words}"):
        Environment(function=function).replies(["2 + 3 = "] * 2, ["1", "0"], [SHARED] * 2)


def right(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """Needs an answer that is a text."""
    return [float(str.__eq__(response, row["answer"])) for response, row in zip(responses, rows, strict=True)]


def reply(prompts: list[str], responses: list[str], rows: list[Row]) -> list[str | None]:
    """The same of an environment."""
    return [None if found else "no" for found in right(prompts, responses, rows)]


def asked(*answers: object) -> list[Row]:
    """Rows with these answers; `...` for none."""
    whole: list[Row] = [{"prompt": f"p{n}", "data_source": "s", "answer": a} for n, a in enumerate(answers)]
    return [{k: v for k, v in row.items() if v is not ...} for row in whole]


def test_a_field_that_some_rows_lack_is_told_of_with_one_of_them() -> None:
    rows = asked("5", ..., "7", ...)
    with pytest.raises(ValueError, match="KeyError") as error:
        score(RewardSpec(functions=right), [str(row["prompt"]) for row in rows], ["5"] * 4, rows)
    assert str(error.value) == (
        "reward function tests.unit.rewards.test_calls.right: KeyError over 4 rows, the first with the "
        "prompt 'p0': 'answer'. 2 of 4 rows have no such field, the first of them with the prompt 'p1'; it "
        "has: data_source, prompt. Complete or remove these rows."
    )
    with pytest.raises(ValueError, match=r"the prompt 'p1': 'answer'\. Rows have: data_source, prompt\.$"):
        score(RewardSpec(functions=right), ["p1"], ["5"], rows[1:2])


@pytest.mark.parametrize(
    "trial", [partial(preflight, RewardSpec(functions=right)), Environment(function=reply).try_out]
)
@pytest.mark.parametrize(
    ("answer", "says"),
    [(..., "KeyError over 1 rows, .*'p6': 'answer'"), (None, "TypeError over 1 rows, .*'p6'")],
)
def test_rows_with_other_fields_are_tried_too(
    trial: Callable[[list[Row]], None], answer: object, says: str
) -> None:
    """Before anything starts, not in the iteration that draws one."""
    trial(asked(*"123456"))
    with pytest.raises(ValueError, match=says):
        trial(asked(*"123456", answer, "7"))


def test_rows_that_are_tried_are_few() -> None:
    rows: list[Row] = [{"prompt": str(n), f"field{n}": n, "data_source": n % 2} for n in range(100)]
    tried = tried_rows([*rows, *rows])
    assert [len(picked) for picked in tried] == [3, 3, *([1] * 16)]
