"""Parse small arithmetic expressions, evaluate them exactly and write them in a normal form.

The parser never executes code. The length of an expression limits the work: without powers, a value cannot have more digits
than its expression has characters; with powers, the size of a value is checked before the value is computed. Values are
fractions. Values are exact, except for irrational roots.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, DecimalException, DivisionByZero, InvalidOperation, Overflow, Underflow
from fractions import Fraction
from typing import Literal

MAX_CHARACTERS = 120
MAX_BITS = 4096
"""Maximum number of bits of the numerator and of the denominator of an intermediate value (1,233 digits)."""
MAX_ROOT = 64
"""Maximum degree of a root that is computed exactly if the root is a fraction."""
DIGITS = 50
"""Number of digits of intermediate values that are not exact."""
SHOWN = 12
"""Number of digits of a value that is displayed in rounded form."""
LONG = 400
"""Maximum number of characters of a fraction that is displayed in full."""

Operator = Literal["+", "-", "*", "/", "//", "**"]


@dataclass(frozen=True, slots=True)
class Value:
    """A number in an expression."""

    number: Fraction


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on two operands; the operator `//` rounds the quotient down."""

    operator: Operator
    left: Expression
    right: Expression


Expression = Value | Operation

_NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)(%?)"
_TOKEN = re.compile(rf"\s*(?:(//|[-+*/()])|{_NUMBER})")
_TOKEN_WITH_POWERS = re.compile(
    rf"\s*(?:(\*\*|\^|//|[-+*/()√²³]|(?:math\.)?(?:sqrt|cbrt)(?=\s*\())|{_NUMBER})", re.IGNORECASE
)
_POWERS: Mapping[str, Sequence[str | Fraction]] = {
    "^": ["**"],
    "²": ["**", Fraction(2)],
    "³": ["**", Fraction(3)],
    "sqrt": ["√"],
    "cbrt": ["∛"],
}
"""Mapping from the spellings of powers and roots to tokens."""
_ROOTS = {"√": 2, "∛": 3}
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "$": None, ",": None})
_OPERATORS: Mapping[str, Operator] = {"+": "+", "-": "-", "*": "*", "/": "/", "//": "//"}
_STRENGTH: Mapping[Operator, int] = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "**": 3}


class NoValueError(ValueError):
    """Raised for an expression that has no value; the message completes a sentence whose subject is the expression."""


def parse_expression(text: str, *, powers: bool = False) -> Expression | None:
    """Parse a string as an expression; return None if it is not an expression.

    Dollar signs and thousands separators are removed, and `20%` is 0.2. With `powers`, `2**10`, `2^10`, `5²`, `sqrt(2)`, `√2`
    and `cbrt(27)` are also accepted. Powers are evaluated from right to left and before a sign (`-2^2` is -4).
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text, place = text.translate(_SPELLINGS).strip(), 0
    tokens: list[str | Fraction] = []
    while place < len(text):
        token = (_TOKEN_WITH_POWERS if powers else _TOKEN).match(text, place)
        if token is None:
            return None
        symbol, number, percent = token.groups()
        if symbol:
            name = symbol.lower().removeprefix("math.")
            tokens += _POWERS.get(name, [name])
        else:
            tokens.append(Fraction(number.rstrip(".")) / (100 if percent else 1))
        place = token.end()
    if not tokens:
        return None
    parsed = _operations(tokens, 0, weakest=1)
    return parsed[0] if parsed and parsed[1] == len(tokens) else None


def _operations(tokens: Sequence[str | Fraction], place: int, weakest: int) -> tuple[Expression, int] | None:
    """Parse the operations from index `place` that bind at least as strongly as `weakest`.

    Returns the parsed operations and the index after them, or None if they cannot be parsed.
    """
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
    """Parse a number, a bracketed expression or a root, with its sign and its exponent."""
    if place >= len(tokens):
        return None
    here = tokens[place]
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
    parsed = _unsigned(tokens, place)
    if parsed is None or parsed[1] >= len(tokens) or tokens[parsed[1]] != "**":
        return parsed
    exponent = _operand(tokens, parsed[1] + 1)
    return exponent and (Operation("**", parsed[0], exponent[0]), exponent[1])


def _unsigned(tokens: Sequence[str | Fraction], place: int) -> tuple[Expression, int] | None:
    if place >= len(tokens):
        return None
    here = tokens[place]
    if isinstance(here, Fraction):
        return Value(here), place + 1
    if here == "(":
        inner = _operations(tokens, place + 1, weakest=1)
        closed = inner is not None and inner[1] < len(tokens) and tokens[inner[1]] == ")"
        return (inner[0], inner[1] + 1) if inner and closed else None
    if here in _ROOTS:
        inner = _unsigned(tokens, place + 1)
        return inner and (Operation("**", inner[0], Value(Fraction(1, _ROOTS[here]))), inner[1])
    return None


def work_out(expression: Expression) -> Fraction | None:
    """Return the exact value of an expression, or None if it divides by zero or contains a power without an exact value."""
    try:
        value, exact = value_of(expression)
    except NoValueError:
        return None
    return value if exact else None


def value_of(expression: Expression) -> tuple[Fraction, bool]:
    """Return the value of an expression and whether the value is exact.

    An inexact value has `DIGITS` correct digits or slightly fewer. Raises NoValueError if the expression divides by zero, has
    no real value, or exceeds the limit `MAX_BITS`.
    """
    if isinstance(expression, Value):
        return expression.number, True
    (left, one), (right, other) = value_of(expression.left), value_of(expression.right)
    if expression.operator == "**":
        value, exact = _power(left, right)
    else:
        found = apply(expression.operator, left, right)
        if found is None:
            raise NoValueError("divides by zero")
        value, exact = found, True
    exact = exact and one and other
    value = value if exact else _rounded(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NoValueError(_TOO_LONG)
    return value, exact


_TOO_LONG = f"has a value of more than {int(MAX_BITS * 0.30103):,} digits on its way"
_CONTEXT = Context(
    prec=DIGITS,
    Emax=MAX_BITS // 4,
    Emin=-MAX_BITS // 4,
    traps=[InvalidOperation, DivisionByZero, Overflow, Underflow],
)


def apply(operator: Operator, left: Fraction, right: Fraction) -> Fraction | None:
    """Return the result of an operation, or None for a division by zero or a power without an exact value."""
    if operator == "**":
        return work_out(Operation(operator, Value(left), Value(right)))
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if right == 0:
        return None
    return left / right if operator == "/" else Fraction(left // right)


def _power(base: Fraction, exponent: Fraction) -> tuple[Fraction, bool]:
    """Return a power and whether the result is exact.

    The result is exact if it is a fraction within the size limit. Roots are always real.
    """
    root, times = exponent.denominator, exponent.numerator
    if base == 0 and times < 0:
        raise NoValueError("divides by zero")
    if base in (0, 1) or times == 0:
        return (Fraction(1) if times == 0 else base), True
    if base < 0 and root % 2 == 0:
        raise NoValueError("asks for a root of a negative number, which is not a real one")
    sign = -1 if base < 0 and times % 2 else 1
    size = abs(base)
    whole = _root(size, root) if root <= MAX_ROOT else None
    if whole == 1:
        return Fraction(sign), True
    if whole is not None:
        bits = max(whole.numerator.bit_length(), whole.denominator.bit_length()) - 1
        if abs(times) * bits <= MAX_BITS:
            return sign * whole**times, True
    try:
        power = _CONTEXT.power(_decimal(size), _decimal(exponent))
    except DecimalException:
        raise NoValueError(_TOO_LONG) from None
    return sign * Fraction(power), False


def _root(number: Fraction, degree: int) -> Fraction | None:
    """Return the root of a positive fraction if this root is also a fraction, otherwise None."""
    above, below = _whole_root(number.numerator, degree), _whole_root(number.denominator, degree)
    return Fraction(above, below) if above and below else None


def _whole_root(number: int, degree: int) -> int | None:
    """Return the integer root of a positive integer, found by bisection, or None if the root is not an integer."""
    low, high = 1, 1 << -(-number.bit_length() // degree)
    while low <= high:
        middle = (low + high) // 2
        power = middle**degree
        if power == number:
            return middle
        low, high = (middle + 1, high) if power < number else (low, middle - 1)
    return None


def _decimal(number: Fraction) -> Decimal:
    return _CONTEXT.divide(Decimal(number.numerator), Decimal(number.denominator))


def _rounded(number: Fraction) -> Fraction:
    try:
        return Fraction(_decimal(number))
    except DecimalException:
        raise NoValueError(_TOO_LONG) from None


def shown(value: Fraction, *, exact: bool) -> str:
    """Return a value as a string: a finite decimal number or a fraction.

    An inexact value or a very long fraction is rounded to `SHOWN` digits.
    """
    text = (decimal(value) or str(value)) if exact else ""
    if text and (len(text) <= LONG or value.denominator == 1):
        return text
    short = Context(prec=SHOWN).divide(Decimal(value.numerator), Decimal(value.denominator)).normalize()
    return f"{short:f}" if abs(short.adjusted()) <= SHOWN else str(short)


def write(expression: Expression) -> str | None:
    """Return an expression as a string in normal form, or None if one of its numbers has no finite decimal form."""
    if isinstance(expression, Value):
        return decimal(expression.number)
    left, right = write(expression.left), write(expression.right)
    if left is None or right is None:
        return None
    strength = _STRENGTH[expression.operator]
    # Without brackets, `a - (b - c)` would be read as `(a - b) - c`.
    if expression.operator == "**":  # powers are evaluated from right to left, and before a sign
        left = f"({left})" if left.startswith("-") or _strength(expression.left) <= strength else left
        right = f"({right})" if _strength(expression.right) < strength else right
        return f"{left}**{right}"
    left = f"({left})" if _strength(expression.left) < strength else left
    right = f"({right})" if _strength(expression.right) <= strength else right
    return f"{left}{expression.operator}{right}"


def _strength(expression: Expression) -> int:
    return 4 if isinstance(expression, Value) else _STRENGTH[expression.operator]


def decimal(number: Fraction) -> str | None:
    """Return a number as its shortest decimal string (`0.5`, `-9`), or None if it has infinitely many digits."""
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
