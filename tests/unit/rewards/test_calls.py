"""How functions of rewards and environments are called, and what they may return."""

from __future__ import annotations

from rlhf_lightning.rewards import Environment, RewardSpec, score

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
