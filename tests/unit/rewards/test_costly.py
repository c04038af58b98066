r"""Which formulas are not evaluated: towers, large powers and large factorials, however they are written."""

from __future__ import annotations

import time

import pytest

from rlhf_lightning.rewards.costly import (
    has_large_power,
    has_large_scale,
    has_many_moves,
    is_costly_arithmetic,
    is_costly_formula,
    is_program,
    too_costly,
)

TOWERS = [
    "9**9**9",
    "9**((9**99))",
    "9**(2*(9**99))",
    "9**(9*(2+(9**99)))",
    "9**((9))**9",
    "9**(9)**9",
    "9**-9**99",
    "9**+9**99",
    "9 ** - ( 9 ** 99 )",
    "9**-(-(9))**9",
    "1 + 2*(3 - 9**(9**9))",
    "9**sqrt(9**99)",
    "9^{(9^99)}",
    r"9^{\left(9^{99}\right)}",
    r"9^\left(9^{99}\right)",
    r"9^\frac{9}{9^{-99}}",
    r"9^{9}\,^{9}",
    "e^{x^2}",
    "9**(9**9",
]
FACTORIALS = [
    "factorial(9**9)",
    "factorial((2*(9**9)))",
    "factorial(factorial(99))",
    "factorial (999999)",
    "factorial(99*99*99)",
    "9**factorial(99)",
    "9**99!",
    "9**(99!)",
    "pow(9, pow(9, 99))",
    "pow(9, 9**9)",
    "pow(9, 99999999)",
    r"\binom{99999}{9999}",
    r"2\tbinom{n+10^9}{8}",
    "gamma(9**9)",
]
LARGE = [
    "9**99999999",
    "9**+99999999",
    "9**((99999999))",
    "9**1_000_000_000",
    "9**(2*(99999999))",
    "9**(999*999*999)",
    "(9**9999)**+9999",
    "(9**9999)**(20*20*20)",
    "((9**(999*999))**20)**20",
    r"\left(x+1\right)^{9999}",
    "x**0*(x+1)**20*(x**2)**20*((9**20)**20)**20",
]


@pytest.mark.parametrize("text", [*TOWERS, *FACTORIALS, *LARGE])
def test_what_could_take_for_ever_is_found(text: str) -> None:
    assert has_large_power(text)
    assert has_large_power(f"so it is {text}, or so")


@pytest.mark.parametrize(
    "text",
    [
        "2**3 + 4**2",
        "(x+1)**2",
        "x**2*y**3",
        "x^2y^3",
        "(2**3)*(4**2)**2",
        "(-2)**-3 - 4**+2",
        "2**(3) (4**2)",
        "x^{2}(x^{3}+1)",
        "e^x(x^2+1)",
        r"e^\pi(x^2+1)",
        r"\sin^{2}x + \cos^{2}x",
        r"\sqrt{x^2+1}^3",
        "e^{2x}",
        r"e^{-\frac{x}{2}} x^2",
        r"2^{\frac{365}{28}}",
        "10^{-3.5} + x^{0.333333}",
        r"\left(x+1\right)^{2}",
        "(x+1)**20 + (x**9 - 3)**19",
        "10**100",
        "exp(x**2)*sin(x**3)/3",
        "factorial(9)**2",
        "pow(2, 10) + 3**2",
        "99!/5!",
        "5!^2",
        "3 != 4**2",
        r"\binom{2048}{1024}x^2",
        r"\binom{n}{2}10^5",
        "",
        "no power",
        " + ".join(f"{power}*x**{power}" for power in range(2, 40)),
    ],
)
def test_ordinary_formulas_are_not(text: str) -> None:
    assert not has_large_power(text)


def test_of_a_formula_that_is_compared_all_exponents_count() -> None:
    assert not too_costly("x^{20}y^{20}z^{20}")
    assert too_costly("x^{20}y^{20}z^{20}w^{20}")
    assert too_costly("x^{0}9^{9999}y^{2}"), "also beside a power of 0"
    assert too_costly("1" * 201)


@pytest.mark.parametrize(
    "text",
    [
        r"\exp(9876543210)",
        r"\exp{\left(9876543210\right)}",
        r"\exp 98765",
        r"\sinh^2(98765)",
        r"\operatorname{cosh}(98765)",
        r"\exp(\exp(23))",
        r"\exp -\exp\exp 23",
        r"e^{\exp(30)}",
        r"9^\sinh(99)",
        r"\exp(9^9)",
        r"\exp(e^{30})",
        r"\exp(\pi^{30})",
        r"\exp((9+x)^9)",
        r"\exp(99*99*99)",
        r"\exp(20!)",
        r"\exp(\frac{1}{1-0.99999})",
    ],
)
def test_an_exponential_of_a_large_number_is_costly(text: str) -> None:
    assert too_costly(text)
    assert too_costly(f"2x + {text}")


@pytest.mark.parametrize(
    "text",
    [
        r"\exp(-\frac{(x-1)^2}{18})",
        r"2\exp(-0.05x) + 99999",
        r"\sinh^2 x + \cosh(2x)",
        r"e^{x}\exp(x^2)",
        r"\exp\left(-\lambda t\right)",
        r"\exp(-2.5(x-0.5))",
        r"100\exp(-0.0231t)",
        r"\exp(0.25x+0.75)",
    ],
)
def test_an_exponential_of_a_variable_is_not(text: str) -> None:
    assert not too_costly(text)


@pytest.mark.parametrize(
    "text", ["(", "9**(", "9**", "^{", "9**9*", "(9)**9", "9**9 ", "9" * 3 + " ", ")!", "binom", "binom{ "]
)
def test_a_long_answer_is_read_once(text: str) -> None:
    start = time.process_time()
    has_large_power(text * 20_000)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("text", ["1e9999", "0.5E-0001", "1e+1,000", "1e1_0_0_0", "2.5e99999/1"])
def test_a_scale_of_four_digits_is_large(text: str) -> None:
    assert has_large_scale(text)


@pytest.mark.parametrize(
    "text", ["", "0.25", "1e-3", "1e999", "12345", "1/2048", "the 4096th", "1e1 2345", "page1234"]
)
def test_other_numbers_have_no_large_scale(text: str) -> None:
    assert not has_large_scale(text)


def test_repeated_moves_count_together() -> None:
    assert has_many_moves("R1001")
    assert has_many_moves("R L00009999999 U")
    assert has_many_moves("R500 L501")
    assert not has_many_moves("R500 L500")
    assert not has_many_moves("R2 U' L2 3Rw " * 50)
    assert not has_many_moves("R U " * 5000)


@pytest.mark.parametrize(
    "text",
    ["exit()", "[0]*3", "1+1", "'a'.upper()", "[x for x in y]", "a[0]", "lambda: 1", "f'{x}'", "x == 3"],
)
def test_what_python_would_execute_is_a_program(text: str) -> None:
    assert is_program(text)
    assert is_program(f"  [{text}]\n")


@pytest.mark.parametrize(
    "text",
    ["", "ABCD", "[['_', 'Q'], [1, -1.5e9]]", "('a', {1, 2}, {3: None})", "so it is 1 + 1", "0 1\n1 0", "\0"],
)
def test_what_python_reads_as_it_stands_or_not_at_all_is_no_program(text: str) -> None:
    assert not is_program(text)


@pytest.mark.parametrize(
    "text",
    ["9**9**9", "1e9999", "'a'", "[1]", "f(x)", "x.y", "1 << 9", "sin(x=1)", "max(x) != 3", "3!*prime(9!)"],
)
def test_what_is_more_than_a_formula_may_be_costly(text: str) -> None:
    assert is_costly_formula(text)
    assert is_costly_formula(f" 3*({text})")


@pytest.mark.parametrize(
    "text",
    [
        *("x!and f()", "x!if f() else 1", "x!or(f)()", "sin!(x)", "(exp)(x)(3)", "N(x)", "S(1)", "3(4)"),
        *("print", "x.is_real", "x .real", "5 .real", "1..real", "\uff45val(1)", "\u212f", "x\u00b2"),
        *("x;y", "x#", "5\\\n6", "x\n+1", "x\0", "`x`", "x=1", "x:=1", "exp(*x)", "exp(**x)", "lambda:1"),
        *("[x]", "x[1]", ".[1]", "x, 1", "()", "", "x<2", "x%2", "x//2", "x@y", "~x", "not x", "x and y"),
        *("x__y", "_", "3 4", "the answer is 42!", "2x", "1_0", "0x10", "1e3", "1j", "07"),
    ],
)
def test_what_is_no_formula_is_not_evaluated(text: str) -> None:
    """Sympy gives Python's `eval` all that it does not know, and `x!and f()` is no mistake to it."""
    assert is_costly_formula(text)
    assert is_costly_arithmetic(text)


@pytest.mark.parametrize(
    "text",
    [
        *("9**0xffffffffff", "9**(1/(1-.9999999999))", "2**3**4", "2**sin(3)", "9**1e12"),
        *("exp(9**10)", "exp(99999999)", "exp(exp(exp(23)))", "exp(sinh(30))", "E**exp(30)", "cosh(9**9)"),
        *("sin(exp(9**10))", "Abs(sin(exp(9**10))-1)*x", "sin(exp(1/(1-0.99999999999)))", "exp(999999*2)"),
        *("exp(x-x+9999999)", "exp((9+x-x)**9)", "((exp(9999)**20)**20)**20", "exp(9**x)**2*exp(E**20)"),
        *("9" * 5000 + ".5", "(" * 5000 + "x" + ")" * 5000, "+".join("x" * 5000)),
    ],
)
def test_a_formula_that_comes_to_a_large_number_is_costly(text: str) -> None:
    assert is_costly_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "(3 - -4)*2/5",
        "5!/4",
        "x**2 + 2^3",
        "exp(-x/2)*sin(2*x) + log(Abs(x)) + C",
        "X**3*exp(5*X)/5 + E**x - exp(-0.05*x**2)",
        "2*sqrt(3)*atan(2*sqrt(3)*(x - 1/2)/3)/3 + log(x, 10)",
        "x**1.5/.5 + 2.*pi - (9**9999)/x1",
        "3 - (\n4)",
        " + ".join(f"{10**16 + power}*x**{power}*y**{power}" for power in range(99)),
    ],
)
def test_formulas_cost_little(text: str) -> None:
    assert not is_costly_formula(text)


def test_arithmetic_has_no_names() -> None:
    assert not is_costly_arithmetic("(3 - -4)*2/5 + .5**2 - 4!")
    assert is_costly_arithmetic("(3 - -4)*2/x")
    assert is_costly_arithmetic("sqrt(4)")
    assert is_costly_arithmetic("9**9**9")


def test_a_formula_too_deep_to_be_read_is_costly() -> None:
    assert is_costly_formula("-" * 50_000 + "x")
    assert is_program("-" * 50_000 + "x")
