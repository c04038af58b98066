"""One sampled response and what is known about it, as a validation step returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

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


def samples_of(outputs: Mapping[str, object]) -> list[Sample]:
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
    missing = [name for name in _REQUIRED if name not in outputs]
    if missing:
        raise ValueError(
            f"SampleTable: validation_step returned {sorted(outputs)}, without {', '.join(missing)}. "
            "Return prompts, responses and scores, lists of one length."
        )
    columns = {name: _items(outputs, name) for name in (*_REQUIRED, "tokens", *PER_TOKEN) if name in outputs}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"SampleTable: validation_step returned lists of different lengths: {lengths}.")
    return [_sample(columns, i) for i in range(lengths["prompts"])]


def _items(outputs: Mapping[str, object], name: str) -> list[object]:
    column = outputs[name]
    if not isinstance(column, list | tuple):
        raise ValueError(
            f"SampleTable: {name} is a {type(column).__name__}. Return a list, for tensors .tolist()."
        )
    return list(column)


def _sample(columns: Mapping[str, list[object]], i: int) -> Sample:
    tokens = tuple(str(token) for token in _row(columns, "tokens", i))
    numbers = {}
    for name in PER_TOKEN if tokens else ():
        if name in columns:
            numbers[name] = tuple(float(cast("float", x)) for x in _row(columns, name, i))
            if len(numbers[name]) != len(tokens):
                raise ValueError(
                    f"SampleTable: row {i} has {len(tokens)} tokens and {len(numbers[name])} numbers in "
                    f"{name}: return one for each token."
                )
    return Sample(
        prompt=str(columns["prompts"][i]),
        response=str(columns["responses"][i]),
        score=float(cast("float", columns["scores"][i])),
        tokens=tokens,
        numbers=numbers,
    )


def _row(columns: Mapping[str, list[object]], name: str, i: int) -> list[object]:
    row = columns[name][i] if name in columns else []
    return list(row) if isinstance(row, list | tuple) else []


def printable(text: str) -> str:
    """Show control characters as pictures and replace what UTF-8 cannot hold."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text.translate(
        {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
    )
