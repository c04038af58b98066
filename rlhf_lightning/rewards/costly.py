"""Formulas that could take for ever to evaluate, such as 9^9^9^9; a model may write any."""

from __future__ import annotations

import re
from math import prod

MAX_CHARACTERS = 200
MAX_EXPONENT = 10_000

# Six digits are enough to tell, and Python reads no number of more than 4,300.
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*[{(]*\s*-?\s*0*(\d{1,6})")
_OF_BRACKET = re.compile(r"[)}\]]\s*(?:\^|\*\*)[\s{(]*-?\s*0*(\d{1,6})")
_COSTLY = re.compile(
    r"(?:\^|\*\*)\s*(?:[{(][^{}()]*(?:\^|\*\*)|\w+\s*(?:\^|\*\*))"  # a power in an exponent
    r"|(?:\^|\*\*)\s*\([^()]*\)\s*(?:\^|\*\*)"  # the same in brackets
    r"|[)}\]]\s*(?:\^|\*\*)[\s{(]*-?\s*(?:2[1-9]|[3-9]\d|\d{3})"  # a large power of a bracket
    r"|\d\d\d\s*!|!\s*!|\)\s*!|\\(?:int|sum|prod|lim|Gamma|zeta)(?![a-zA-Z])"
)


def too_costly(text: str) -> bool:
    """Return whether comparing a formula symbolically could take for ever."""
    if len(text) > MAX_CHARACTERS or has_large_power(text):
        return True
    return prod(map(int, _EXPONENT.findall(text))) > MAX_EXPONENT


def has_large_power(text: str) -> bool:
    """Return whether a formula of any length has a tower of powers, a large power or a large factorial.

    Many small powers, as those of a polynomial, are none.
    """
    if _COSTLY.search(text) or any(int(power) > MAX_EXPONENT for power in _EXPONENT.findall(text)):
        return True
    return prod(map(int, _OF_BRACKET.findall(text))) > MAX_EXPONENT
