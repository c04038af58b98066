"""The reward function `maths_answer`: whether a response's final number or formula is right.

Numbers are compared exactly, as fractions; everything else by the math-verify library, symbolically.
"""

from __future__ import annotations

import logging
import re
import threading
from fractions import Fraction

from rlhf_lightning.extras import import_extra
from rlhf_lightning.rewards.costly import MAX_CHARACTERS, too_costly
from rlhf_lightning.rewards.functions import answer_of

# The library warns where its time-out is off, and at every time-out.
logging.getLogger("math_verify").setLevel(logging.ERROR)

TIMEOUT_S = 3
"""Longest parse or comparison; the library's time-out works by a signal, so in the main thread only."""

_BOXED = "\\boxed{"
_HASHES = re.compile(r"####[ \t]*(.+)")
_NUMBER = re.compile(r"[-\u2212]?\$?(?:\d{1,3} +\d+\s*/\s*\d+|(?:\d[\d,]*)?\.?\d+(?:\s*/\s*\d+)?)")
_GOES_ON = (
    r"(?:and|or|to|pi|sqrt|exp|log|ln|sin|cos|tan|plus|minus|over|squared|cubed"
    r"|(?:hundred|thousand|million|billion|dozen)s?)\b"
)
"""Words with which a number is not at its end."""
_WORDED = re.compile(rf"([+-]?\$?[\d,]*\.?\d+)[.,;:]?\s+(?!{_GOES_ON})(?:[^\W\d_]{{2,}}|\().*")
"""A number with words behind it: a unit, or what it was made of."""
_PLAIN = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:/\d+)?")
_MIXED = re.compile(r"([+-]?)(\d{1,9}) +(\d{1,9}/0*[1-9]\d{0,9})")
"""A number such as 1 1/2, which is 3/2."""


def maths_answer(prompts: list[str], responses: list[str], rows: list[dict[str, object]]) -> list[float]:
    r"""Give 1 where the response's final answer equals the row's `answer`, else 0.

    The final answer of a text is its last `\boxed{...}`, else what follows the last `####`, of a number with
    words behind it the number, else the last number. The row's answer may be such a text, as in GSM8K, or
    the bare answer.
    """
    del prompts
    import_extra("math_verify", extra="tasks", purpose="the reward function maths_answer")
    scores = []
    for response, row in zip(responses, rows, strict=True):
        reference = answer_of(row, "maths_answer")
        gold = _marked(reference)
        answer = final_answer(response)
        scores.append(float(answer is not None and same_answer(reference if gold is None else gold, answer)))
    return scores


def final_answer(text: str) -> str | None:
    """Return the final answer of a text, or None where it has none."""
    marked = _marked(text)
    if marked is not None:
        return marked
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def same_answer(gold: str, answer: str) -> bool:
    """Return whether two final answers mean the same.

    Args:
        gold: the right one.
        answer: a model's, which may be anything: what would take too long to compare is wrong.
    """
    left, right = _normalise(gold), _normalise(answer)
    if left == right:
        return bool(left)
    numbers = _number(left), _number(right)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return not too_costly(right) and _same_formula(left, right)


def _marked(text: str) -> str | None:
    """Return the last answer that a text marks by `boxed` or ####, or None."""
    start = text.rfind(_BOXED)
    if start >= 0:
        return _in_braces(text, start + len(_BOXED))
    hashes = _HASHES.findall(text)
    return _WORDED.sub(r"\1", hashes[-1].strip(" \t*")) if hashes else None


def _in_braces(text: str, start: int) -> str | None:
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index].strip()
    return None


def _normalise(answer: str) -> str:
    text = answer.strip().strip("$").strip().rstrip(".").replace("\\$", "").replace("$", "")
    text = text.replace("\\!", "").replace("{,}", ",").replace("\u2212", "-")
    text = re.sub(r"\s*/\s*", "/", text).strip()
    if mixed := _MIXED.fullmatch(text):
        sign, whole, part = mixed.groups()
        text = sign + str(int(whole) + Fraction(part))
    return text


def _number(text: str) -> Fraction | None:
    if len(text) > MAX_CHARACTERS or not _PLAIN.fullmatch(text):
        return None
    numerator, _, denominator = text.partition("/")
    divisor = Fraction(denominator or 1)
    return None if divisor == 0 else Fraction(numerator) / divisor


def _same_formula(gold: str, answer: str) -> bool:
    library = import_extra("math_verify", extra="tasks", purpose="the reward function maths_answer")
    timeout_s = TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    parsed = [library.parse(f"${text}$", parsing_timeout=timeout_s) for text in (gold, answer)]
    return bool(library.verify(*parsed, timeout_seconds=timeout_s))
