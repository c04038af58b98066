"""Small reward functions. Copy one to begin your own: `(prompts, responses, rows) -> scores`."""

from __future__ import annotations

LENGTH_SCALE = 256
"""Characters at which `length` reaches 1."""
PIECE = 4
"""Characters in what `repetition` compares."""


def exact_match(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """Give 1 where the response is the row's `answer`, white space around it aside, else 0."""
    del prompts
    pairs = zip(responses, rows, strict=True)
    return [float(response.strip() == answer_of(row, "exact_match")) for response, row in pairs]


def partial_match(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """Give the share of positions at which the response and the row's `answer` have the same character."""
    del prompts
    scores = []
    for response, row in zip(responses, rows, strict=True):
        text, answer = response.strip(), answer_of(row, "partial_match")
        same = sum(a == b for a, b in zip(text, answer, strict=False))
        scores.append(same / max(len(text), len(answer), 1))
    return scores


def length(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """The response's length, from 0 (empty) to 1 (256 characters); a negative weight favours brevity."""
    del prompts, rows
    return [min(len(response), LENGTH_SCALE) / LENGTH_SCALE for response in responses]


def too_long(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """Give 1 where the response has more characters than the row's `answer`, else 0: meant as a cost."""
    del prompts
    pairs = zip(responses, rows, strict=True)
    return [float(len(response.strip()) > len(answer_of(row, "too_long"))) for response, row in pairs]


def repetition(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    """The share of the response's pieces of 4 characters that it had before, 0 to 1: meant as a cost."""
    del prompts, rows
    scores = []
    for response in responses:
        pieces = [response[start : start + PIECE] for start in range(len(response) - PIECE + 1)]
        scores.append(1 - len(set(pieces)) / len(pieces) if pieces else 0.0)
    return scores


def answer_of(row: dict[str, object], function: str) -> str:
    """Return the row's `answer` as a text without white space around it.

    Raises:
        ValueError: the row has none, or null.
    """
    if row.get("answer") is None:
        inner = [f" {n}.ground_truth" for n, v in row.items() if isinstance(v, dict) and "ground_truth" in v]
        raise ValueError(
            f"{function} compares with the row's field 'answer', this row has: {_fields(row)}; "
            f"{prompt_beginning(row)}. Name the field that holds it by --data.answer_field"
            f"{''.join(inner[:1])}, or use another function."
        )
    return str(row["answer"]).strip()


def _fields(row: dict[str, object]) -> str:
    return ", ".join(f"{name} (null)" if value is None else name for name, value in row.items())


def prompt_beginning(row: dict[str, object]) -> str:
    """The part of a sentence that says which row it is about."""
    return f"its prompt begins {str(row.get('prompt', ''))[:60]!r}"
