from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.patience import timed

from kapelle.grading.math.calculation import (
    Expression,
    Operation,
    Operator,
    Value,
    decimal,
    parse_expression,
    work_out,
    write,
)


@pytest.mark.parametrize(
    ("text", "normal", "value"),
    [
        ("48/2", "48/2", "24"),
        (" 48 / 2 ", "48/2", "24"),
        ("18*.5", "18*0.5", "9"),
        ("$1,250*2", "1250*2", "2500"),
        ("20%*50", "0.2*50", "10"),
        ("9.00", "9", "9"),
        ("007+1", "7+1", "8"),
        ("(3*30)+(25*4)", "3*30+25*4", "190"),
        ("2*(20+7*1)", "2*(20+7*1)", "54"),
        ("10-(5-3)", "10-(5-3)", "8"),
        ("10-5-3", "10-5-3", "2"),
        ("100/(2/4)", "100/(2/4)", "200"),
        ("100/5/4", "100/5/4", "5"),
        ("560//10", "560//10", "56"),
        ("7//2", "7//2", "3"),
        ("71+-3", "71+-3", "68"),
        ("-20+10", "-20+10", "-10"),
        ("-48+21+(-3)", "-48+21+-3", "-30"),
        ("3*+6", "3*6", "18"),
        ("-(2+3)", "0-(2+3)", "-5"),
        ("3×4÷2−1", "3*4/2-1", "5"),
        ("1/3", "1/3", "1/3"),
        ("2+3*4", "2+3*4", "14"),
        ("(2+3)*4", "(2+3)*4", "20"),
    ],
)
def test_expressions(text: str, normal: str, value: str) -> None:
    expression = parse_expression(text)
    assert expression is not None
    assert write(expression) == normal
    assert work_out(expression) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "+",
        "5+",
        "*5",
        "(5",
        "5)",
        "()",
        "5 5",
        "2(3)",
        "2**3",
        "5x",
        "x",
        "1e5",
        "5=5",
        "1..2",
        "５",
        "__import__('os')",
    ],
)
def test_what_is_no_expression(text: str) -> None:
    assert parse_expression(text) is None


@pytest.mark.parametrize("text", ["(" * 120, "(" * 10_000_000, "-" * 120, "1+" * 60, "9" * 1_000_000])
def test_no_text_takes_long_or_deep(text: str) -> None:
    found, seconds = timed(lambda: parse_expression(text), 0.5)
    assert found is None
    assert seconds < 0.5


@pytest.mark.parametrize("text", ["1/0", "1//0", "5/(2-2)", "1/0*0"])
def test_a_division_by_zero_is_worth_nothing(text: str) -> None:
    expression = parse_expression(text)
    assert expression is not None
    assert work_out(expression) is None


@pytest.mark.parametrize(
    ("number", "text"),
    [
        ("1/2", "0.5"),
        ("-9", "-9"),
        ("1/8", "0.125"),
        ("3/40", "0.075"),
        ("-1/50", "-0.02"),
        ("0", "0"),
        ("1200", "1200"),
    ],
)
def test_decimals(number: str, text: str) -> None:
    assert decimal(Fraction(number)) == text


def test_numbers_without_a_finite_decimal_form() -> None:
    assert decimal(Fraction(1, 3)) is None
    assert write(Value(Fraction(1, 7))) is None


OPERATORS: list[Operator] = ["+", "-", "*", "/", "//"]
EXPRESSIONS: st.SearchStrategy[Expression] = st.recursive(
    st.integers(-99, 99).map(lambda n: Value(Fraction(n, 10))),
    lambda inner: st.builds(Operation, st.sampled_from(OPERATORS), inner, inner),
    max_leaves=5,
)


@given(EXPRESSIONS)
def test_what_is_written_is_read_as_the_same(expression: Expression) -> None:
    written = write(expression)
    assert written is not None
    assert parse_expression(written) == expression
