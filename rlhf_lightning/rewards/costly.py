"""Answers that are not evaluated: one could take for ever, such as 9^9^9^9; a model may write any."""

from __future__ import annotations

import ast
import re
from fractions import Fraction
from itertools import pairwise
from math import inf, prod

MAX_CHARACTERS = 200
MAX_EXPONENT = 10_000
MAX_POWER = 1_000_000
"""Most that exponents come to, multiplied with each other: 9 to that power takes less than a second."""
MAX_BITS = 100_000
"""Most that a number which a formula of Python comes to may have, by a bound of it."""
MAX_MOVES = 1_000
"""Most that the numbers of an answer in moves come to: so many turns of a cube take a tenth of a second."""

# Signs and brackets may stand before an exponent. Six digits are enough to tell, and Python reads no number
# of more than 4,300.
_EXPONENT = re.compile(r"(?:\^|\*\*)[\s{(+~-]*0*(\d{1,6})")
_OF_BRACKET = re.compile(r"[)}\]]\s*(?:\^|\*\*)[\s{(+~-]*0*(\d{1,6})")
_NUMBER = re.compile(r"(?<![\d.])0*(\d{1,6})")
_COSTLY = re.compile(
    r"[)}\]]\s*(?:\^|\*\*)[\s{(+~-]*(?:2[1-9]|[3-9]\d|\d{3})"  # a large power of a bracket
    r"|\d\d\d\s*!|!\s*!|\)\s*!|\\(?:int|sum|prod|lim|Gamma|zeta)(?![a-zA-Z])"
    r"|binom[\s{]*[^{}]{0,40}(?:\d{5}|\^)"
)
_SCALED = re.compile(r"[\d.][eE][+-]?\d{4}")
_REPEATED = re.compile(r"0*(\d{1,6})")
_SILENT = re.compile(r"\\(?:left|right|[,;:!])|(?<=\d)_(?=\d)")
# Of a power and a function the operand follows, of n! it stands before.
_GROWTH = re.compile(r"\^|\*\*|!(?!=)|(?:pow|gamma|(?:sub)?factorial2?)(?=\s*\()")
_SIGNED = re.compile(r"[\s+~-]*(\\?[A-Za-z]+|[\d.]+)?\s*")
_BRACKETS = re.compile(r"[(){}\[\]]")
_EXPONENTIAL = re.compile(r"(?:exp|sinh|cosh)(?![A-Za-z])")
_RAISED = re.compile(r"\^|\*\*")
_OF_NUMBER = re.compile(r"(?:\d|pi|(?<![A-Za-z])e)\s*\}?\s*(?:\^|\*\*)|!")
_DECIMALS = re.compile(r"\.(\d+)")
_BEFORE_POWER = re.compile(r"[)}\]]\s*(?=\^|\*\*)")
_VALUE = (ast.Expression, ast.Constant, ast.Name, ast.expr_context, ast.UnaryOp, ast.unaryop)
_LITERAL = (*_VALUE, ast.List, ast.Tuple, ast.Set, ast.Dict)
_FORMULA = (*_VALUE, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.BitXor, ast.Call)
_ELEMENTARY = re.compile("exp|log|ln|sqrt|Abs|a?(?:sin|cos|tan)h?|sec|csc|cot")
_SIGNS = re.compile(r"[\w\s.,+*/^()!-]*", re.ASCII)
_WORD = re.compile(r"[\w.]+", re.ASCII)
_KNOWN = re.compile(rf"\d+\.?\d*|\.\d+|[A-Za-z]\d?|pi|{_ELEMENTARY.pattern}", re.ASCII)
_DECIMAL = re.compile(r"\d*\.\d*")


def too_costly(text: str) -> bool:
    """Return whether comparing a formula symbolically could take for ever."""
    if len(text) > MAX_CHARACTERS or has_large_power(text) or has_large_scale(text):
        return True
    if _has_large_exponential(_SILENT.sub("", text)):
        return True
    return prod(max(1, int(power)) for power in _EXPONENT.findall(text)) > MAX_EXPONENT


def has_large_power(text: str) -> bool:
    """Return whether a formula of any length has a tower of powers, a large power or a large factorial.

    Many small powers, as those of a polynomial, are none.
    """
    text = _SILENT.sub("", text)
    if _COSTLY.search(text) or any(int(power) > MAX_EXPONENT for power in _EXPONENT.findall(text)):
        return True
    of_brackets = prod(max(1, int(power)) for power in _OF_BRACKET.findall(text))
    return of_brackets > MAX_EXPONENT or _power(text) > MAX_POWER


def has_large_scale(text: str) -> bool:
    """Return whether a number has an exponent of ten of four digits or more, such as 1e999999999."""
    return bool(_SCALED.search(re.sub("[,_]", "", text)))


def has_many_moves(text: str) -> bool:
    """Return whether moves that are repeated by numbers, such as R2 or R999999999, are too many."""
    return sum(map(int, _REPEATED.findall(text))) > MAX_MOVES


def names_nan(text: str) -> bool:
    """Return whether a text says `nan`, in capitals or with blanks too, which passes a verifier's minimum."""
    return "nan" in "".join(text.split()).lower()


def is_program(text: str) -> bool:
    """Return whether Python would do more over a text than make a list or a name of it: calls, operations."""
    return any(not isinstance(node, _LITERAL) for node in _nodes(text))


def is_costly_arithmetic(text: str) -> bool:
    """Return whether a text is no arithmetic with numbers alone, or whether sympy could take for ever."""
    return any(map(str.isalpha, text)) or is_costly_formula(text)


def is_costly_formula(text: str) -> bool:
    """Return whether a text is no formula of variables and elementary functions, or could take for ever.

    Sympy runs what it reads as a program of Python. So nothing passes but numbers, the signs of arithmetic
    and names that are known, and that only as Python itself reads it.
    """
    if not _SIGNS.fullmatch(text) or not all(map(_KNOWN.fullmatch, _WORD.findall(text))):
        return True
    if has_large_power(text):
        return True
    try:
        fractions = _DECIMAL.sub(lambda number: f"({Fraction(f'0{number[0]}0')})", text)
        # Python reads no 9!; two digits are the most that has_large_power lets through.
        nodes = _nodes(fractions.replace("!", "**99"))
        return not nodes or not all(map(_in_formula, nodes)) or _bits(nodes[0]) > MAX_BITS
    except (OverflowError, RecursionError, ValueError):  # the last of a number with thousands of digits
        return True


def _in_formula(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and bool(_ELEMENTARY.fullmatch(node.func.id))
    return isinstance(node, _FORMULA)


def _bits(node: ast.AST) -> float:
    """No number that a formula comes to has more bits before or behind its point, whatever cancels out."""
    match node:
        case ast.Constant(value=int() as number):
            return max(1, number.bit_length())
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            return _bits(base) * _size(exponent)
        case ast.Call(func=ast.Name(id="exp" | "sinh" | "cosh"), args=arguments):
            return 2 * sum(map(_size, arguments))
        case _:
            return max(1, sum(map(_bits, ast.iter_child_nodes(node))))


def _size(exponent: ast.AST) -> float:
    """What neither an exponent nor its inverse exceeds, whatever cancels out; infinite for functions.

    Raises:
        OverflowError: it is larger than floats reach.
    """
    match exponent:
        case ast.Constant(value=int() as number):
            return max(1.0, float(number))
        case ast.Name(id=name):
            return 4.0 if name in {"E", "pi"} else 1.0
        case ast.BinOp(left=base, op=ast.Pow(), right=power):
            return float(_size(base) ** _size(power))
        case ast.Call():
            return inf
        case _:
            return prod(map(_size, ast.iter_child_nodes(exponent)))


def _nodes(text: str) -> list[ast.AST]:
    """The parts of an expression of Python; none of another text, and a pass where it is too deep."""
    try:
        return [*ast.walk(ast.parse(text.strip(), mode="eval"))]
    except (SyntaxError, ValueError):  # of a null character the latter
        return []
    except (MemoryError, RecursionError):
        return [ast.Pass()]


def _has_large_exponential(text: str) -> bool:
    """Whether exp, sinh or cosh has a large number in its operand, or stands in an exponent: exp(exp(99))."""
    closing = _closing(text)
    exponents = [text[sign.end() : _end(text, sign.end(), closing)] for sign in _RAISED.finditer(text)]
    if any(map(_EXPONENTIAL.search, exponents)):
        return True
    return any(_is_large(_operand(text, name.end(), closing)) for name in _EXPONENTIAL.finditer(text))


def _is_large(operand: str) -> bool:
    # Without an operand of its own it has the next one for it, as in \exp\exp 99.
    if not re.search(r"\w", operand) or _EXPONENTIAL.search(operand) or _OF_NUMBER.search(operand):
        return True
    size = prod(max(1, int(number)) for number in _NUMBER.findall(operand))
    size *= 10 ** sum(map(len, _DECIMALS.findall(operand)))
    powers = prod(max(1, int(power)) for power in _OF_BRACKET.findall(operand))
    return size > MAX_EXPONENT or bool(size**powers > MAX_EXPONENT)


def _power(text: str) -> float:
    """The largest exponent, multiplied with those of brackets; in each all numbers are multiplied.

    The operand of a factorial counts a hundredfold. Infinite where a power or a factorial stands in the
    operand of another, or directly behind it: 9^9^9, 9**(2*9**9), 9**(9)!, factorial(9**9).
    """
    closing, behind = _closing(text), {bracket.end() for bracket in _BEFORE_POWER.finditer(text)}
    largest, of_brackets = 1, 1
    for growth, following in pairwise([*_GROWTH.finditer(text), None]):
        if growth is None or growth[0] == "!":
            continue
        is_power = growth[0] in {"^", "**"}
        end = _end(text, growth.end(), closing) if is_power else closing[text.index("(", growth.end())]
        if following and not text[end : following.start()].strip():  # or before the end
            return inf
        numbers = prod(max(1, int(number)) for number in _NUMBER.findall(text, growth.end(), end))
        if growth.start() in behind:
            of_brackets *= numbers
        else:
            largest = max(largest, numbers if is_power else 100 * numbers)
    return largest * of_brackets


def _end(text: str, start: int, closing: dict[int, int]) -> int:
    """Where an exponent ends that begins at `start`: a number, a name, a bracket, a function or a command."""
    signed = _SIGNED.match(text, start)
    assert signed is not None  # it may match nothing
    word, end = signed[1] or "", signed.end()
    if not word:
        return closing[end] + 1 if end in closing else end
    behind = "{[" if word[0] == "\\" else "(" if len(word) > 1 and word.isalpha() else ""
    while end in closing and text[end] in behind:
        end = closing[end] + 1
    return end


def _operand(text: str, start: int, closing: dict[int, int]) -> str:
    """What follows an exponential: a bracket, or else all up to the next one, which is its factor."""
    start += len(text[start:]) - len(text[start:].lstrip())
    if start in closing:
        return text[start : closing[start]]
    following = _EXPONENTIAL.search(text, start)
    return text[start : following and following.start()]


def _closing(text: str) -> dict[int, int]:
    """Of each bracket that opens, where it is closed; the end of the text where it is not."""
    opened, found = list[int](), dict[int, int]()
    for bracket in _BRACKETS.finditer(text):
        if bracket[0] in "({[":
            opened.append(bracket.start())
        elif opened:
            found[opened.pop()] = bracket.start()
    return found | dict.fromkeys(opened, len(text))
