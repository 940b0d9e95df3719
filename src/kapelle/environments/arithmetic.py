"""Arithmetic problems that one agent prepares and another finishes.

The first agent reads `47+85` and writes notes; the second reads only the notes and writes the answer:

    47+85  →  2,12+1  →  132        85-47  →  8,4-1  →  38

A single agent with the role `work_out` writes its work before its answer: the value of each decimal place, then their sum,
as in `120+12=132` or `40-2=38`.

The notes start with the units. Every column below the top shows its last digit before the incoming carry, and the top column
shows its full sum. `+1` (`-1` in subtractions) marks a carry (a borrow) from the column below. The notes do not contain the full
sum of the units, so only the mark distinguishes `132` from `122`. The team needs both agents, and each script can have a flaw.

With other operators, several operations, brackets or fractions, a task is an expression that the first agent reduces to one step:

    47×85  →  3760+235  →  3995      3995÷85  →  40+7  →  47      (2+3)×4-6  →  20-6  →  14      3/4+5/6  →  9/12+10/12  →  19/12

Values are computed as fractions, so answers are exact. Every form of the correct value is accepted (`1 7/12`, `38/24`).
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from kapelle.environments.grading.math.calculation import (
    Expression,
    Operation,
    Value,
    apply,
    parse_expression,
    work_out,
)
from kapelle.environments.grading.text.extraction import ExtractionRule
from kapelle.environments.questions import TEST_SHARE, Answers, Flaws, Questions, check_flaws, flawed, numbers
from kapelle.environments.questions import split_of as split_of_key
from kapelle.errors import DataError
from kapelle.types import Json, Message, Split, Task

Role = Literal["columns", "combine", "solve", "work_out"]
"""`columns`: question → notes. `combine`: notes → answer. `solve`: question → answer. `work_out`: question → work and answer."""


Sign = Literal["+", "-", "*", "/"]
_SIGNS: Mapping[str, Sign] = {"−": "-", "×": "*", "·": "*", "÷": "/", ":": "/"}
"""Other spellings of operators."""
_WRITTEN: Mapping[str, str] = {"*": "×", "/": "÷"}
MAX_DIGITS = 48
"""Maximum number of digits of an answer (numerator and denominator together), as in the graders."""
TRIES = 2_000
"""Maximum number of draws for one task."""


def _spelled(value: object) -> object:
    """Return operators as settings spell them, converting `×` and `÷`; return other values unchanged."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(_SIGNS.get(sign, sign) if isinstance(sign, str) else sign for sign in value)


class Arithmetic(Questions):
    """Generated problems such as `a+b`, `a×b` or `(a-b)÷c+d`, with answers that are never negative."""

    name: Literal["arithmetic"] = "arithmetic"
    digits: int = Field(default=2, ge=1, le=12)
    """Digits of both operands; leading zeros occur only in one-digit operands."""
    operators: Annotated[tuple[Sign, ...], BeforeValidator(_spelled)] = Field(default=("+",), min_length=1)
    """Operators, drawn uniformly for each operation: `+`, `-`, `*` (or `×`) and `/` (or `÷`)."""
    operations: int = Field(default=1, ge=1, le=8)
    """Number of operations in a task."""
    brackets: bool = False
    """Whether expressions may have brackets."""
    fractions: bool = False
    """True: operands can be fractions with `digits` digits in numerator and denominator. False: every division has a whole result."""
    carry_share: float | None = Field(default=None, ge=0.0, le=1.0)
    """Share of tasks with a carry or borrow in the units column; null: random (45 % for `+`)."""
    seed: int = 0
    """A different seed gives different tasks in a different order. The split of the operand pairs stays the same."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("last_number",), min_length=1)
    """Rules that extract an agent's answer."""
    roles: Mapping[str, Role] = Field(default={"reasoner": "columns", "actor": "combine"})
    """Agent → the role of its script; agents that are not listed have the role `solve`."""
    flaws: Flaws = Field(default={})
    """Agent → share of its demonstrations in which the script loses a carry."""

    @model_validator(mode="after")
    def _possible(self) -> Arithmetic:
        if self.digits == 1 and "-" in self.operators and self.carry_share:
            raise ValueError("One-digit subtractions never borrow. Remove `carry_share`, or set `digits: 2`.")
        if self.brackets and self.operations == 1:
            raise ValueError("`brackets: true` needs at least two operations. Set `operations: 2`.")
        if self.carry_share is not None and (self._expressions or not {"+", "-"} & set(self.operators)):
            raise ValueError(
                "`carry_share` applies only to sums and differences of two whole numbers. Remove it, or remove `operations`, "
                "`fractions` and all operators other than + and -."
            )
        most = self.digits * (self.operations + 1) * (2 if self.fractions else 1)
        if self._expressions and most > MAX_DIGITS:
            raise ValueError(
                f"`digits: {self.digits}` with `operations: {self.operations}`{' and fractions' * self.fractions} gives answers of up to "
                f"{most} digits; the limit is {MAX_DIGITS}. Reduce one of these settings."
            )
        return self

    @property
    def _expressions(self) -> bool:
        """Whether every task is an expression rather than a sum or difference in columns."""
        return self.operations > 1 or self.fractions

    @property
    def _columns_only(self) -> bool:
        return not self._expressions and {"+", "-"} >= set(self.operators)

    @property
    def answers(self) -> Answers:
        """One number, which can be a mixed number such as `1 7/12`."""
        return numbers(self.extraction)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Describe the operand pairs of each split. A hash assigns each pair to a split."""
        kind = f"generated problems of {self.digits} digits"
        if not self._columns_only:
            signs = " ".join(_WRITTEN.get(sign, sign) for sign in dict.fromkeys(self.operators))
            more = f"{' in brackets' * self.brackets}{' and fractions' * self.fractions}"
            kind = f"{kind} with {self.operations} of {signs}{more}"
        return {
            "train": f"{kind}, {TEST_SHARE - 1} of {TEST_SHARE} operand pairs",
            "test": f"{kind}, the other operand pairs",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError when `flaws` names an unknown agent."""
        check_flaws(self.flaws, agents)

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index, drawn from the pairs of its split."""
        draw = random.Random(f"{self.seed}/{split}/{index}")
        if self._expressions:
            return self._expression_task(draw, split, index)
        low = 0 if self.digits == 1 else 10 ** (self.digits - 1)
        operator = draw.choice(self.operators)
        carry = None if self.carry_share is None else draw.random() < self.carry_share
        while True:
            a, b = draw.randrange(low, 10**self.digits), draw.randrange(low, 10**self.digits)
            if operator in _WRITTEN:
                # A division's answer is a factor of the inverse product, so both problems belong to the same split.
                if split_of(a, b) != split or (operator == "/" and not b):
                    continue
                question, answer = (f"{a}×{b}", a * b) if operator == "*" else (f"{a * b}÷{b}", a)
                return Task(f"{split}-{index}", question, {"answer": answer})
            if operator == "-" and a < b:
                a, b = b, a
            fits = carry is None or carry == (_carries(a, operator, b)[0] != 0)
            if fits and split_of(a, b) == split:
                break
        answer = a + b if operator == "+" else a - b
        return Task(f"{split}-{index}", f"{a}{operator}{b}", {"answer": answer})

    def _expression_task(self, draw: random.Random, split: Split, index: int) -> Task:
        """Return a task with several operations or fractions; raise DataError if none is found for the split."""
        for _ in range(TRIES):
            expression = self._chain(draw, self.operations)
            value = None if expression is None else work_out(expression)
            if expression is None or value is None or value < 0:
                continue
            if split_of_key(_unordered(expression)) == split:
                answer: Json = value.numerator if value.denominator == 1 else str(value)
                return Task(f"{split}-{index}", written(expression), {"answer": answer})
        raise DataError(
            f"`arithmetic` found no expression for the {split} split in {TRIES} draws. Increase `environment.digits`."
        )

    def _chain(self, draw: random.Random, operations: int) -> Expression | None:
        """Return an expression of this many operations; × and ÷ precede + and -. None if a division has no whole result."""
        total: Expression | None = None
        sign: Sign = "+"
        term, left = self._operand(draw, operations)
        while left:
            operator = draw.choice(self.operators)
            if operator in ("+", "-"):
                total = term if total is None else Operation(sign, total, term)
                sign = operator
                term, left = self._operand(draw, left - 1)
            elif operator == "*" or self.fractions:
                factor, left = self._operand(draw, left - 1)
                term = Operation(operator, term, factor)
            else:
                divided = self._divided(draw, term)
                if divided is None:
                    return None
                term, left = divided, left - 1
        return term if total is None else Operation(sign, total, term)

    def _operand(self, draw: random.Random, room: int) -> tuple[Expression, int]:
        """Return an operand, and how many of the `room` operations remain after those inside its brackets."""
        if self.brackets and room and draw.random() < 0.5:
            inner = draw.randint(1, room)
            expression = self._chain(draw, inner)
            if expression is not None:
                return expression, room - inner
        number = Fraction(self._whole(draw))
        if self.fractions and draw.random() < 0.75:
            number /= draw.randrange(2, max(3, 10**self.digits))
        return Value(number), room

    def _whole(self, draw: random.Random) -> int:
        return draw.randrange(1 if self.digits == 1 else 10 ** (self.digits - 1), 10**self.digits)

    def _divided(self, draw: random.Random, term: Expression) -> Expression | None:
        """Return a term divided by one of its divisors; None if it has none."""
        divisor = self._whole(draw)
        if (multiple := _times(term, divisor)) is not None:
            return Operation("/", multiple, Value(Fraction(divisor)))
        value = work_out(term)
        assert value is not None, "every earlier division has a whole result"
        known = [each for each in range(2, min(10**self.digits, 1000)) if value.numerator % each == 0]
        return Operation("/", term, Value(Fraction(draw.choice(known)))) if known else None

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return whether any column carries or borrows. For expressions, return whether they contain × and ÷."""
        if not self._columns_only:
            return {"times": "×" in task.question, "divided": "÷" in task.question}
        return {"carry": any(_carries(*_operands(task.question)))}

    def belongs_to(self, expression: Expression) -> Split:
        """Return the split of a problem, so that no test task also occurs in `train`."""
        if isinstance(expression, Operation) and not self._expressions:
            left, right = work_out(expression.left), work_out(expression.right)
            if expression.operator == "/" and left is not None and right:
                left /= right  # a division's answer is a factor of the inverse product
            if left is not None and right is not None and left.denominator == right.denominator == 1:
                return split_of(int(left), int(right))
        return split_of_key(_unordered(expression))

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the text for the agent's role; it lacks the carry in the share of demonstrations that `flaws` sets."""
        carry = not flawed(self.flaws, agent, seed)
        role = self.roles.get(agent, "solve")
        received = messages[-1].content if messages else ""
        if self._expressions or _QUESTION.fullmatch(task.question) is None:
            step = received if role == "combine" else step_before(task.question, whole=carry)
            if role == "work_out":
                return f"{step}={value_of(step, whole=True)}"
            return step if role == "columns" else value_of(step, whole=carry or role == "solve")
        if role == "combine":
            return combine(received, carry=carry)
        notes = columns(task.question, carry=carry)
        if role == "columns":
            return notes
        answer = combine(notes, carry=True)
        return f"{places(task.question)}={answer}" if role == "work_out" else answer


def split_of(a: int, b: int) -> Split:
    """Return the split that a pair of operands belongs to, in either order and for every operator."""
    return split_of_key(",".join(map(str, sorted((a, b)))))


_QUESTION = re.compile(r"([0-9]+)([+-])([0-9]+)")


def _operands(question: str) -> tuple[int, str, int]:
    match = _QUESTION.fullmatch(question)
    assert match, f"not a question of this environment: {question}"
    return int(match[1]), match[2], int(match[3])


def _digits(a: int, operator: str, b: int) -> list[int]:
    """Return each column's sum or difference from the units up, without carries."""
    width = len(str(max(a, b)))
    sign = 1 if operator == "+" else -1
    return [x + sign * y for x, y in zip(_padded(a, width), _padded(b, width), strict=True)]


def _padded(number: int, width: int) -> list[int]:
    return [int(digit) for digit in reversed(str(number).zfill(width))]


def _carries(a: int, operator: str, b: int) -> list[int]:
    """Return the carry of each column below the top, from the units up: 0, 1, or -1 for a borrow."""
    carries: list[int] = []
    for column in _digits(a, operator, b)[:-1]:
        carries.append((column + (carries[-1] if carries else 0)) // 10)
    # The only column of a one-digit problem is also the top one.
    return carries or [_digits(a, operator, b)[0] // 10]


def columns(question: str, *, carry: bool) -> str:
    """Return the notes on a question, with or without carry marks."""
    operands = _operands(question)
    sums = _digits(*operands)
    carried = [0, *_carries(*operands)][: len(sums)]
    shown = [*(column % 10 for column in sums[:-1]), sums[-1]]
    marks = [f"{each:+d}" if each and carry else "" for each in carried]
    return ",".join(f"{column}{mark}" for column, mark in zip(shown, marks, strict=True))


def places(question: str) -> str:
    """Return the value of each decimal place of a question, from the highest place down: `120+12`, `40-2`."""
    terms = [value * 10**place for place, value in enumerate(_digits(*_operands(question)))]
    first, *rest = [term for term in reversed(terms) if term] or [0]
    return f"{first}" + "".join(f"{term:+d}" for term in rest)


_COLUMN = re.compile(r"([0-9]{1,2})([+-]1)?")


def combine(notes: str, *, carry: bool) -> str:
    """Return the answer that follows from the notes, or `?` if they cannot be parsed."""
    parsed = [_COLUMN.fullmatch(part) for part in notes.strip().split(",")]
    if not all(parsed):
        return "?"
    values = [int(match[1]) + (int(match[2] or 0) if carry else 0) for match in parsed if match]
    low = "".join(str(value % 10) for value in reversed(values[:-1]))
    return str(int(f"{max(values[-1], 0)}{low}"))


# -------- Expressions: write them, reduce them to one step, and compute their exact value


def written(expression: Expression) -> str:
    """Return an expression as a question: `(2+3)×4-6`, `(3/4)÷(5/6)`."""
    if isinstance(expression, Value):
        return str(expression.number)
    product = expression.operator in _WRITTEN
    left, right = written(expression.left), written(expression.right)
    if product and (_sum(expression.left) or (isinstance(expression.left, Value) and "/" in left)):
        left = f"({left})"  # so that the fraction bar is not read as an operation
    # Brackets preserve the order if the right operand is an operation of equal precedence.
    bare = not _sum(expression.right) and not right.startswith("-")
    if not _plain_number(expression.right) if product else not bare:
        right = f"({right})"
    return f"{left}{_WRITTEN.get(expression.operator, expression.operator)}{right}"


def _times(term: Expression, factor: int) -> Expression | None:
    """Return a product whose first number is multiplied by a factor; None if it begins with a sum in brackets."""
    if isinstance(term, Value):
        return Value(term.number * factor)
    first = None if term.operator in ("+", "-") else _times(term.left, factor)
    return None if first is None else Operation(term.operator, first, term.right)


def _plain_number(expression: Expression) -> bool:
    return isinstance(expression, Value) and expression.number.denominator == 1 and expression.number >= 0


def _sum(expression: Expression) -> bool:
    return isinstance(expression, Operation) and expression.operator in ("+", "-")


def _unordered(expression: Expression) -> str:
    """Return a key of a problem that is independent of the order of the operands of + and ×."""
    if isinstance(expression, Value):
        return str(expression.number)
    parts = [_unordered(expression.left), _unordered(expression.right)]
    if expression.operator in ("+", "*"):
        parts.sort()
    return f"({parts[0]}{expression.operator}{parts[1]})"


def step_before(question: str, *, whole: bool) -> str:
    """Return the last step before the answer, which a second agent can finish. If `whole` is False, its last part is missing."""
    expression = parse_expression(question)
    assert isinstance(expression, Operation), f"not a question of this environment: {question}"
    left, right = work_out(expression.left), work_out(expression.right)
    assert left is not None, question
    assert right is not None, question
    value = apply(expression.operator, left, right)
    assert value is not None, question
    if expression.operator in ("+", "-"):
        under = math.lcm(left.denominator, right.denominator)
        parts = [
            f"{side.numerator * under // side.denominator}{f'/{under}' * (under > 1)}"
            for side in (left, right)
        ]
        sign: str = expression.operator
        if right < 0:
            parts[1] = f"({parts[1]})"
    elif left.denominator == right.denominator == value.denominator == 1:
        # Place values of the second factor, or of the quotient.
        split = right if expression.operator == "*" else value
        half = Fraction(10) ** (len(str(abs(split.numerator))) // 2)
        high = split.numerator // half * half
        factor = left if expression.operator == "*" else 1
        parts = [str(factor * each) for each in (high, split - high) if each]
        parts = parts or ["0"]
        sign = "+" if len(parts) == 1 or not parts[1].startswith("-") else ""
    else:
        top, bottom = left.numerator * right.numerator, left.denominator * right.denominator
        if expression.operator == "/":
            top, bottom = left.numerator * right.denominator, left.denominator * right.numerator
        parts, sign = [str(top), str(bottom)], "/"
    return sign.join(parts) if whole else parts[0]


def value_of(notes: str, *, whole: bool) -> str:
    """Return the exact value of an expression, or of its first operand if `whole` is False; `?` if it cannot be computed."""
    expression = parse_expression(notes.strip())
    if isinstance(expression, Operation) and not whole:
        expression = expression.left
    value = None if expression is None else work_out(expression)
    return "?" if value is None else str(value)
