"""What mathematical answers are made of: numbers, lists, sets, intervals, points, matrices, words."""

from __future__ import annotations

from dataclasses import dataclass, field

from kapelle.grading.math.algebra import Quotient


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
    """Without leading zeros, with its sign."""
    base: int


@dataclass(frozen=True, slots=True)
class Equation:
    """What is 0."""

    difference: Quotient
    left: Quotient | None = field(default=None, compare=False)
    """The side before `=` as it is written; the other one is it less the difference."""


@dataclass(frozen=True, slots=True)
class Several:
    """Values side by side.

    `list`: with repetitions, in any order. `set`: without, in any order.
    `()`, `(]`, `[)`, `[]`: a point or an interval, in this order. `union`: of intervals, in any order.
    `ratio`: of three or more, in this order, up to a factor. `mod`: the least number that is not negative, and the modulus.
    `named`: `x = 1, y = 2`, in the order of the answer's names.
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
    """The name before the equals sign: `x` for `x = 5`, `x,y` for `x = 1, y = 2`; empty without one."""
    unit: str
    """Its unit in lower case; empty without one."""
    letters: frozenset[str]
    """The letters that its value is written with, cancelled ones included."""
    plain: str = ""
    """How it is written where it is letters alone: `odd` is a word or a product."""
