"""Small arithmetic expressions: parsed, evaluated exactly, and written in one normal form.

The parser never executes code, and the length of a text bounds the work: powers are unsupported, so a value
cannot outgrow its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MAX_CHARACTERS = 120

Operator = Literal["+", "-", "*", "/", "//"]


@dataclass(frozen=True, slots=True)
class Value:
    """A number."""

    number: Fraction


@dataclass(frozen=True, slots=True)
class Operation:
    """Two operands and what is done with them; `//` rounds the quotient down."""

    operator: Operator
    left: Expression
    right: Expression


Expression = Value | Operation

_TOKEN = re.compile(r"\s*(?:(//|[-+*/()])|([0-9]+\.?[0-9]*|\.[0-9]+)(%?))")
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "$": None, ",": None})
_OPERATORS: Mapping[str, Operator] = {"+": "+", "-": "-", "*": "*", "/": "/", "//": "//"}
_STRENGTH: Mapping[Operator, int] = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2}


def parse_expression(text: str) -> Expression | None:
    """Return the expression that a text is, or None for anything else.

    Dollar signs and thousands separators are dropped and `20%` is 0.2.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text, place = text.translate(_SPELLINGS).strip(), 0
    tokens: list[str | Fraction] = []
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            return None
        symbol, number, percent = token.groups()
        tokens.append(symbol or Fraction(number.rstrip(".")) / (100 if percent else 1))
        place = token.end()
    if not tokens:
        return None
    parsed = _operations(tokens, 0, weakest=1)
    return parsed[0] if parsed and parsed[1] == len(tokens) else None


def _operations(tokens: Sequence[str | Fraction], place: int, weakest: int) -> tuple[Expression, int] | None:
    """Parse operations at least as strong as `weakest` from a place; return them and the place after."""
    parsed = _operand(tokens, place)
    while parsed is not None:
        left, place = parsed
        operator = _OPERATORS.get(str(tokens[place])) if place < len(tokens) else None
        if operator is None or _STRENGTH[operator] < weakest:
            return parsed
        following = _operations(tokens, place + 1, _STRENGTH[operator] + 1)
        parsed = following and (Operation(operator, left, following[0]), following[1])
    return None


def _operand(tokens: Sequence[str | Fraction], place: int) -> tuple[Expression, int] | None:
    if place >= len(tokens):
        return None
    here = tokens[place]
    if isinstance(here, Fraction):
        return Value(here), place + 1
    if here == "(":
        inner = _operations(tokens, place + 1, weakest=1)
        closed = inner is not None and inner[1] < len(tokens) and tokens[inner[1]] == ")"
        return (inner[0], inner[1] + 1) if inner and closed else None
    if here in {"+", "-"}:
        signed = _operand(tokens, place + 1)
        if signed is None or here == "+":
            return signed
        operand, after = signed
        negative = (
            Value(-operand.number)
            if isinstance(operand, Value)
            else Operation("-", Value(Fraction(0)), operand)
        )
        return negative, after
    return None


def work_out(expression: Expression) -> Fraction | None:
    """Return the exact value of an expression; None if it divides by zero."""
    if isinstance(expression, Value):
        return expression.number
    left, right = work_out(expression.left), work_out(expression.right)
    return None if left is None or right is None else apply(expression.operator, left, right)


def apply(operator: Operator, left: Fraction, right: Fraction) -> Fraction | None:
    """Return the result of one operation; None for a division by zero."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if right == 0:
        return None
    return left / right if operator == "/" else Fraction(left // right)


def write(expression: Expression) -> str | None:
    """Return an expression in its normal form; None if a number lacks a finite decimal form."""
    if isinstance(expression, Value):
        return decimal(expression.number)
    left, right = write(expression.left), write(expression.right)
    if left is None or right is None:
        return None
    strength = _STRENGTH[expression.operator]
    # An operation on the right of an equal one would be read the other way round without its brackets.
    left = f"({left})" if _strength(expression.left) < strength else left
    right = f"({right})" if _strength(expression.right) <= strength else right
    return f"{left}{expression.operator}{right}"


def _strength(expression: Expression) -> int:
    return 3 if isinstance(expression, Value) else _STRENGTH[expression.operator]


def decimal(number: Fraction) -> str | None:
    """Return a number as a shortest decimal (`0.5`, `-9`); None if it has infinitely many digits."""
    rest, places = number.denominator, 0
    for factor in (2, 5):
        count = 0
        while rest % factor == 0:
            rest, count = rest // factor, count + 1
        places = max(places, count)
    if rest != 1:
        return None
    digits = str(abs(number.numerator) * 10**places // number.denominator).zfill(places + 1)
    sign = "-" if number < 0 else ""
    return f"{sign}{digits[: len(digits) - places]}{'.' if places else ''}{digits[len(digits) - places :]}"
