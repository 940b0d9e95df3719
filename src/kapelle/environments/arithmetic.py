"""Generated arithmetic problems that one agent prepares and another agent solves.

The first agent reads `47+85` and writes notes. The second agent reads only the notes and writes the answer:

    47+85  →  2,12+1  →  132        85-47  →  8,4-1  →  38

A single agent with the role `work_out` writes its work before its answer. The work is the value of each decimal place and the
answer is the sum of these values, as in `120+12=132` or `40-2=38`.

The notes start with the units column. For every column except the highest, the notes contain the last digit before the incoming
carry; for the highest column, they contain the full sum. The mark `+1` is a carry from the next lower column, and `-1` is a borrow.
The notes do not contain the full sum of the units column, so only the mark distinguishes `132` from `122`. The team therefore needs
both agents. The setting `flaws` can introduce mistakes into the script of each agent.

With other operators, several operations, brackets or fractions, a task is an expression, which the first agent reduces to one
operation:

    47×85  →  3760+235  →  3995      3995÷85  →  40+7  →  47      (2+3)×4-6  →  20-6  →  14      3/4+5/6  →  9/12+10/12  →  19/12

Values are computed as fractions, so answers are exact. Every way of writing the correct value is accepted (such as `1 7/12` or
`38/24`).
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
"""The role of an agent's script. `columns` writes notes on the question. `combine` computes the answer from the notes. `solve` writes
the answer to the question. `work_out` writes the work and the answer."""


Sign = Literal["+", "-", "*", "/"]
_SIGNS: Mapping[str, Sign] = {"−": "-", "×": "*", "·": "*", "÷": "/", ":": "/"}
"""Mapping from alternative spellings of operators to the spelling in settings."""
_WRITTEN: Mapping[str, str] = {"*": "×", "/": "÷"}
MAX_DIGITS = 48
"""The maximum number of digits of an answer (numerator and denominator together). The graders have the same limit."""
TRIES = 2_000
"""The maximum number of random expressions that are generated in search of a valid one for a task."""


def _spelled(value: object) -> object:
    """Convert alternative spellings of operators (such as `×` and `÷`) in a list to their spelling in settings.

    Values that are not lists are returned unchanged.
    """
    if not isinstance(value, list | tuple):
        return value
    return tuple(_SIGNS.get(sign, sign) if isinstance(sign, str) else sign for sign in value)


class Arithmetic(Questions):
    """Generated problems such as `a+b`, `a×b` or `(a-b)÷c+d`. Answers are never negative."""

    name: Literal["arithmetic"] = "arithmetic"
    digits: int = Field(default=2, ge=1, le=12)
    """The number of digits of each operand. Only one-digit operands can be 0."""
    operators: Annotated[tuple[Sign, ...], BeforeValidator(_spelled)] = Field(default=("+",), min_length=1)
    """The operators to use: `+`, `-`, `*` (or `×`) and `/` (or `÷`). The operator of each operation is sampled uniformly."""
    operations: int = Field(default=1, ge=1, le=8)
    """The number of operations in a task."""
    brackets: bool = False
    """Whether expressions may contain brackets."""
    fractions: bool = False
    """Whether operands can be fractions with up to `digits` digits in the numerator and denominator. If false, the result of every
    division is a whole number."""
    carry_share: float | None = Field(default=None, ge=0.0, le=1.0)
    """The fraction of tasks with a carry or borrow in the units column. If null, carries occur at random (in 45 % of the tasks with
    `+`)."""
    seed: int = 0
    """The seed of the task generator. Different seeds generate different tasks in a different order, but the split of an operand pair
    does not depend on the seed."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("last_number",), min_length=1)
    """Rules that extract the answer from an agent's text."""
    roles: Mapping[str, Role] = Field(default={"reasoner": "columns", "actor": "combine"})
    """Mapping from an agent to the role of its script. Agents that are not listed have the role `solve`."""
    flaws: Flaws = Field(default={})
    """Mapping from an agent to the fraction of its demonstrations in which its script omits the carries."""

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
        """Whether every task is an expression, as opposed to a sum or difference that is computed column by column."""
        return self.operations > 1 or self.fractions

    @property
    def _columns_only(self) -> bool:
        return not self._expressions and {"+", "-"} >= set(self.operators)

    @property
    def answers(self) -> Answers:
        """The grader of answers. An answer is one number, which can be a mixed number such as `1 7/12`."""
        return numbers(self.extraction)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the operand pairs of each split. A hash of the operand pair determines its split."""
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
        """Raise ConfigError if `flaws` names an unknown agent."""
        check_flaws(self.flaws, agents)

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index. The operands are sampled from the pairs that belong to the split."""
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
        """Return a task with several operations or fractions. Raises DataError if no expression for the split is found."""
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
        """Return a random expression with the given number of operations, or None if the result of a division is not a whole number.

        In the expression, × and ÷ take precedence over + and -.
        """
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
        """Return an operand and the number of remaining operations.

        The operand may be an expression in brackets, whose operations are subtracted from `room`.
        """
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
        """Return the term divided by a number such that the result is a whole number, or None if no such number is found."""
        divisor = self._whole(draw)
        if (multiple := _times(term, divisor)) is not None:
            return Operation("/", multiple, Value(Fraction(divisor)))
        value = work_out(term)
        assert value is not None, "every earlier division has a whole result"
        known = [each for each in range(2, min(10**self.digits, 1000)) if value.numerator % each == 0]
        return Operation("/", term, Value(Fraction(draw.choice(known)))) if known else None

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return properties of the task for reports.

        For sums and differences in columns, this is whether any column has a carry or borrow. For other tasks, it is whether the
        question contains × and whether it contains ÷.
        """
        if not self._columns_only:
            return {"times": "×" in task.question, "divided": "÷" in task.question}
        return {"carry": any(_carries(*_operands(task.question)))}

    def belongs_to(self, expression: Expression) -> Split:
        """Return the split of an expression.

        Problems with the same operands belong to the same split, so no test problem occurs in training.
        """
        if isinstance(expression, Operation) and not self._expressions:
            left, right = work_out(expression.left), work_out(expression.right)
            if expression.operator == "/" and left is not None and right:
                left /= right  # a division's answer is a factor of the inverse product
            if left is not None and right is not None and left.denominator == right.denominator == 1:
                return split_of(int(left), int(right))
        return split_of_key(_unordered(expression))

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the demonstration for the role of the agent.

        In the fraction of demonstrations that `flaws` sets, the carries are omitted.
        """
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
    """Return the split of a pair of operands. The split does not depend on the order of the operands or on the operator."""
    return split_of_key(",".join(map(str, sorted((a, b)))))


_QUESTION = re.compile(r"([0-9]+)([+-])([0-9]+)")


def _operands(question: str) -> tuple[int, str, int]:
    match = _QUESTION.fullmatch(question)
    assert match, f"not a question of this environment: {question}"
    return int(match[1]), match[2], int(match[3])


def _digits(a: int, operator: str, b: int) -> list[int]:
    """Return the sum or difference of the digits in each column, without carries. The units column comes first."""
    width = len(str(max(a, b)))
    sign = 1 if operator == "+" else -1
    return [x + sign * y for x, y in zip(_padded(a, width), _padded(b, width), strict=True)]


def _padded(number: int, width: int) -> list[int]:
    return [int(digit) for digit in reversed(str(number).zfill(width))]


def _carries(a: int, operator: str, b: int) -> list[int]:
    """Return the carry of each column except the highest: 0, 1, or -1 for a borrow. The units column comes first."""
    carries: list[int] = []
    for column in _digits(a, operator, b)[:-1]:
        carries.append((column + (carries[-1] if carries else 0)) // 10)
    # The only column of a one-digit problem is also the top one.
    return carries or [_digits(a, operator, b)[0] // 10]


def columns(question: str, *, carry: bool) -> str:
    """Return the notes on a question, with carry marks if `carry` is true."""
    operands = _operands(question)
    sums = _digits(*operands)
    carried = [0, *_carries(*operands)][: len(sums)]
    shown = [*(column % 10 for column in sums[:-1]), sums[-1]]
    marks = [f"{each:+d}" if each and carry else "" for each in carried]
    return ",".join(f"{column}{mark}" for column, mark in zip(shown, marks, strict=True))


def places(question: str) -> str:
    """Return the sum or difference of each decimal place as one expression, such as `120+12` or `40-2`. The highest place comes first."""
    terms = [value * 10**place for place, value in enumerate(_digits(*_operands(question)))]
    first, *rest = [term for term in reversed(terms) if term] or [0]
    return f"{first}" + "".join(f"{term:+d}" for term in rest)


_COLUMN = re.compile(r"([0-9]{1,2})([+-]1)?")


def combine(notes: str, *, carry: bool) -> str:
    """Return the answer that follows from the notes, or `?` if the notes cannot be parsed. If `carry` is false, carry marks are ignored."""
    parsed = [_COLUMN.fullmatch(part) for part in notes.strip().split(",")]
    if not all(parsed):
        return "?"
    values = [int(match[1]) + (int(match[2] or 0) if carry else 0) for match in parsed if match]
    low = "".join(str(value % 10) for value in reversed(values[:-1]))
    return str(int(f"{max(values[-1], 0)}{low}"))


# -------- Expressions: write them, reduce them to one step, and compute their exact value


def written(expression: Expression) -> str:
    """Return an expression in the notation of questions, such as `(2+3)×4-6` or `(3/4)÷(5/6)`."""
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
    """Return the product with its first number multiplied by a factor, or None if the product begins with a sum in brackets."""
    if isinstance(term, Value):
        return Value(term.number * factor)
    first = None if term.operator in ("+", "-") else _times(term.left, factor)
    return None if first is None else Operation(term.operator, first, term.right)


def _plain_number(expression: Expression) -> bool:
    return isinstance(expression, Value) and expression.number.denominator == 1 and expression.number >= 0


def _sum(expression: Expression) -> bool:
    return isinstance(expression, Operation) and expression.operator in ("+", "-")


def _unordered(expression: Expression) -> str:
    """Return a key that identifies a problem. The key does not depend on the order of the operands of + and ×."""
    if isinstance(expression, Value):
        return str(expression.number)
    parts = [_unordered(expression.left), _unordered(expression.right)]
    if expression.operator in ("+", "*"):
        parts.sort()
    return f"({parts[0]}{expression.operator}{parts[1]})"


def step_before(question: str, *, whole: bool) -> str:
    """Return the last step before the answer, from which a second agent can compute the answer.

    If `whole` is false, only the first part of the step is returned.
    """
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
    """Return the exact value of an expression, or `?` if the value cannot be computed.

    If `whole` is false, only the first operand of the expression is evaluated.
    """
    expression = parse_expression(notes.strip())
    if isinstance(expression, Operation) and not whole:
        expression = expression.left
    value = None if expression is None else work_out(expression)
    return "?" if value is None else str(value)
