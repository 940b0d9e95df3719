r"""What a mathematical answer is: numbers, expressions, lists, sets, intervals, points, matrices, words.

`read_answer` takes a text apart without evaluating any of it; `same_answer` compares two readings. The
comparison is exact and symmetric, and the order counts only where it means something (points, intervals,
matrices).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from kapelle.grading.math import algebra
from kapelle.grading.math.algebra import Quotient
from kapelle.grading.math.expression import Refused, read_expression
from kapelle.grading.math.numeric import parse_number
from kapelle.grading.math.text import PLAIN_UNITS, Written, split_top, take_apart

MAX_ITEMS = 32
"""Items of one list; they are matched pair by pair."""


@dataclass(frozen=True, slots=True)
class Words:
    """A name or a sentence, in lower case where it is longer than a letter."""

    text: str


@dataclass(frozen=True, slots=True)
class Infinity:
    """An end of an interval."""

    positive: bool


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in a base that is written behind them: `1012_3`."""

    digits: str
    """Without leading zeros."""
    base: int


@dataclass(frozen=True, slots=True)
class Equation:
    """What is 0."""

    difference: Quotient


@dataclass(frozen=True, slots=True)
class Several:
    """Values side by side.

    `list`: with repetitions, in any order. `set`: without, in any order.
    `()`, `(]`, `[)`, `[]`: a point or an interval, in this order. `union`: of intervals, in any order.
    `row`: of a matrix, and `matrix`: of its rows, in this order.
    """

    kind: str
    items: tuple[Value, ...]


Value = Quotient | Words | Infinity | Based | Equation | Several


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as it was read."""

    value: Value
    name: str
    """The name before the equals sign: `x` for `x = 5`; empty without one."""
    unit: str
    """Its unit in lower case; empty without one."""
    letters: frozenset[str]
    """The letters that its value is written with, cancelled ones included."""


def read_answer(text: str) -> Answer:
    """Return the value that a text writes. Raises Refused for what must not be read as an answer, Unfamiliar for the rest."""
    written = take_apart(text)
    letters: set[str] = set()
    value = _value(written, letters)
    return Answer(value, written.name, written.unit, frozenset(letters))


def _value(written: Written, letters: set[str]) -> Value:
    if written.words:
        return Words(written.body)
    sides = split_top(written.body, "=")
    if len(sides) > 2:
        raise Refused("It holds several equations.")
    if len(sides) == 2:
        left, right = (_single(side, letters) for side in sides)
        return Equation(algebra.add(left, algebra.negate(right)))
    items = _items(written.body, letters)
    return items[0] if len(items) == 1 else Several("list", tuple(items))


def _items(body: str, letters: set[str]) -> list[Value]:
    whole = parse_number(body)
    if whole is not None:
        return [algebra.number(whole.figure)]
    parts = split_top(body, ",")
    if len(parts) > MAX_ITEMS:
        raise Refused(f"It lists more than {MAX_ITEMS} values.")
    return [value for part in parts for value in _item(part.strip(), letters)]


def _single(text: str, letters: set[str]) -> Quotient:
    values = read_expression(text, letters)
    if len(values) != 1:
        raise Refused("It holds ± in an equation.")
    return values[0]


_MATRIX = re.compile(r"\\begin\{([pb]?)matrix\}((?:(?!\\begin).)*)\\end\{\1matrix\}", re.DOTALL)
_BASED = re.compile(r"([0-9A-F]{1,64})_\{?([0-9]{1,2})\}?")
_INFINITY = re.compile(r"([-+]?)\s*\\infty")


def _item(text: str, letters: set[str]) -> Sequence[Value]:
    if not text:
        raise Refused("Something is missing between commas.")
    single = _atom(text)
    if single is not None:
        return [single]
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None:
        rows = matrix[2].strip().removesuffix("\\\\").split("\\\\")
        return [Several("matrix", tuple(_several("row", row.split("&"), letters) for row in rows))]
    parts = _bracketed(text)
    if parts is not None:
        return [_several(parts[0], parts[1], letters)]
    return list(read_expression(text, letters))


def _atom(text: str) -> Value | None:
    if _INFINITY.fullmatch(text):
        return Infinity(not text.startswith("-"))
    if text in {"\\emptyset", "\\varnothing"}:
        return Several("set", ())
    based = _BASED.fullmatch(text)
    return _based(based[1], int(based[2])) if based is not None and text[0].isdigit() else None


def _bracketed(text: str) -> tuple[str, list[str]] | None:
    joined = split_top(text, "\\cup")
    if len(joined) > 1:
        return "union", joined
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2].strip()
        return "set", split_top(inner, ",") if inner else []
    if text[0] in "([" and text[-1] in ")]":
        # `(1)(2)` opens with a bracket and ends with another one.
        inside = split_top(text[1:-1], ",") if _balanced(text[1:-1]) else []
        if len(inside) > 1:
            return text[0] + text[-1], inside
    return None


def _several(kind: str, parts: Sequence[str], letters: set[str]) -> Several:
    if len(parts) > MAX_ITEMS:
        raise Refused(f"It lists more than {MAX_ITEMS} values.")
    values = tuple(value for part in parts for value in _item(part.strip(), letters))
    return Several(kind, values)


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _based(digits: str, base: int) -> Based:
    if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in digits):
        raise Refused("Its digits are not of its base.")
    return Based(digits.lstrip("0") or "0", base)


Percent = Literal["figure", "hundredths"]
"""`figure`: 50% is 50, its question names the unit. `hundredths`: 50% is 1/2."""


def same_answer(one: Answer, other: Answer, percent: Percent = "figure") -> bool:
    """Return whether two answers are the same; symmetric.

    A name or a plain unit counts where both have one. An answer with letters that the other lacks is
    another answer, even where they cancel.
    """
    if isinstance(one.value, Equation) or isinstance(other.value, Equation):
        return _same_equation(one, other)
    if one.name and other.name and one.name != other.name:
        return False
    if one.letters != other.letters and not _one_word(one.value, other.value):
        return False
    pairs = [
        (scaled, other_scaled)
        for scaled, unit in _measures(one, percent)
        for other_scaled, other_unit in _measures(other, percent)
        if _units_agree(unit, other_unit)
    ]
    return any(_same(left, right) for left, right in pairs)


def _measures(answer: Answer, percent: Percent) -> list[tuple[Value, str]]:
    value, unit = answer.value, answer.unit
    if isinstance(value, Quotient) and unit == "%":
        hundredths = algebra.divide(value, algebra.number(Fraction(100)))
        return [(value, "")] if percent == "figure" else [(hundredths, "")]
    if isinstance(value, Quotient) and unit in {"degree", "degrees"}:
        half_turns = algebra.divide(value, algebra.number(Fraction(180)))
        # `π/4°` is not π/4: degrees that are themselves a number of π stand for nothing but degrees.
        bare = "degree" if value.rational is not None else "degrees as written"
        return [(value, bare), (algebra.multiply(half_turns, algebra.letter("\\pi")), "radians")]
    return [(value, unit)]


def _units_agree(one: str, other: str) -> bool:
    if one == other:
        return True
    return (not one and other in PLAIN_UNITS) or (not other and one in PLAIN_UNITS)


def _one_word(one: Value, other: Value) -> bool:
    return isinstance(one, Words) or isinstance(other, Words)


def _same_equation(one: Answer, other: Answer) -> bool:
    if _all_letters(one) != _all_letters(other):
        return False
    differences = []
    for answer in (one, other):
        value = answer.value
        if isinstance(value, Quotient) and answer.name:
            value = Equation(algebra.add(algebra.letter(answer.name), algebra.negate(value)))
        if not isinstance(value, Equation):
            return False
        differences.append(value.difference)
    return differences[0].proportional(differences[1])


def _all_letters(answer: Answer) -> frozenset[str]:
    return answer.letters | {answer.name} if answer.name else answer.letters


def _same(one: Value, other: Value) -> bool:
    if isinstance(one, Quotient) and isinstance(other, Quotient):
        return one.same(other)
    if isinstance(one, Several) and isinstance(other, Several):
        return _same_several(one, other)
    if isinstance(one, Words) != isinstance(other, Words):
        # `\text{C}` and `C` are the same letter.
        words, value = (one, other) if isinstance(one, Words) else (other, one)
        assert isinstance(words, Words), "one of both is"
        return len(words.text) == 1 and isinstance(value, Quotient) and value == algebra.letter(words.text)
    return type(one) is type(other) and one == other


def _same_several(one: Several, other: Several) -> bool:
    kinds = {one.kind, other.kind}
    if len(kinds) == 1 and one.kind in {"list", "union"}:
        return _matched(one.items, other.items)
    if kinds == {"set"}:
        return _covers(one.items, other.items) and _covers(other.items, one.items)
    if kinds == {"set", "list"}:
        # A list names the members of a set when it names each once.
        return _matched(_distinct(one), _distinct(other)) and all(_no_twice(each) for each in (one, other))
    if len(kinds) > 1 or len(one.items) != len(other.items):
        return False
    return all(_same(left, right) for left, right in zip(one.items, other.items, strict=True))


def _distinct(several: Several) -> tuple[Value, ...]:
    kept: list[Value] = []
    for value in several.items:
        if not any(_same(value, before) for before in kept):
            kept.append(value)
    return tuple(kept)


def _no_twice(several: Several) -> bool:
    return several.kind == "set" or len(_distinct(several)) == len(several.items)


def _covers(members: Sequence[Value], others: Sequence[Value]) -> bool:
    return all(any(_same(member, other) for other in others) for member in members)


def _matched(one: Sequence[Value], other: Sequence[Value]) -> bool:
    # Sameness is an equivalence here, so taking the first partner loses nothing.
    left = list(other)
    for value in one:
        place = next((index for index, partner in enumerate(left) if _same(value, partner)), None)
        if place is None:
            return False
        left.pop(place)
    return not left
