"""One sampled response and what is known about it, as a validation step returns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_lightning.reporting import PER_TOKEN

_REQUIRED = ("prompts", "responses", "scores")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, the response, its score and, if asked for, numbers token by token."""

    prompt: str
    """The prompt's text."""
    response: str
    """The response's text."""
    score: float
    """The reward's score."""
    tokens: tuple[str, ...] = ()
    """The response token by token, as text; empty if not asked for."""
    numbers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Some of `PER_TOKEN`, one number for each token."""


def samples_of(outputs: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """Read what a validation step returned.

    Args:
        outputs: `prompts` and `responses` (lists of str) and `scores` (list of float); optionally `tokens` (a
            list of str for each response) and `kl`, `values`, `advantages` (a list of float for each, one
            number a token).

    Returns:
        One sample a row.

    Raises:
        ValueError: a key is missing, or lengths differ.
    """
    if missing := [name for name in _REQUIRED if name not in outputs]:
        raise ValueError(
            f"SampleTable: validation_step returned {sorted(outputs)}, without {', '.join(missing)}. "
            "Return prompts, responses and scores, lists of one length."
        )
    per_token = ("tokens", *PER_TOKEN) if "tokens" in outputs else ()
    columns = {name: outputs[name] for name in (*_REQUIRED, *per_token) if name in outputs}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"SampleTable: validation_step returned lists of different lengths: {lengths}.")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for row in rows:
        counts = {name: len(row[name]) for name in per_token if name in row}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"SampleTable: validation_step returned numbers and tokens of a response in different "
                f"lengths: {counts}. Return one number a token."
            )
    return [
        Sample(
            prompt=str(row["prompts"]),
            response=str(row["responses"]),
            score=float(row["scores"]),
            tokens=tuple(map(str, row.get("tokens", ()))),
            numbers={name: tuple(map(float, row[name])) for name in PER_TOKEN if name in row},
        )
        for row in rows
    ]


def printable(text: str) -> str:
    """Show control characters as pictures and replace what UTF-8 cannot hold."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text.translate(
        {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
    )
