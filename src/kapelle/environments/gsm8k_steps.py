"""The calculator steps that are annotated in the solutions of GSM8K, such as `<<48/2=24>>`, as tasks for very small models.

GSM8K (arXiv:2110.14168) has 23,716 steps in the train split and 4,282 in the test split. Two thirds of the test steps also occur
verbatim in the train split. `info["seen"]` marks these steps, so that memorised and computed answers can be distinguished. `3*4`
and `4*3` count as different steps.

In normalised steps, `.5` becomes `0.5`, `9.00` becomes `9`, `20%` becomes 0.2, and `$` and unnecessary brackets are removed.
Annotations that cannot be parsed, incorrect results, steps without an operation (`12=12`), and steps with more than `longest`
characters are excluded. All other steps contain only `0-9 + - * / . ( )`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from pydantic import Field

from kapelle.environments.data.source import DataFiles, DataSource
from kapelle.environments.grading.math.calculation import (
    Expression,
    Operation,
    Value,
    apply,
    decimal,
    parse_expression,
    work_out,
    write,
)
from kapelle.environments.grading.text.extraction import ExtractionRule
from kapelle.environments.questions import Answers, Flaws, Questions, check_flaws, flawed, numbers
from kapelle.errors import DataError
from kapelle.types import Json, Message, Split, Task

# -------- The worked notes of a calculator step: the step is rewritten until only a sum remains
#
#     7*48        280+56               one term per digit, as in long multiplication
#     85-47       40-2                 one term per decimal place
#     252/12      20+1                 one term per digit of the quotient
#     5*20/100    100/100=1            one operation after another, then the terms of the last one
#     3*4+5       12+5=10+7
#
# A reader of the notes adds the last terms.


def notes(step: Expression) -> str:
    """Return the worked notes of a step: the forms into which the step is rewritten and finally its terms, separated by `=`."""
    stages: list[str] = []
    # Rewrite until the step is a sum of numbers, or one product or quotient of two numbers.
    while isinstance(step, Operation) and _addends(step) is None and not _on_numbers(step):
        rewritten = _rewritten(step)
        written = write(rewritten)
        if written is None or rewritten == step:
            # A value such as 1/3 has no decimal form: write only the result.
            return "=".join([*stages, _sum(_digits(_value(step)))])
        stages.append(written)
        step = rewritten
    return "=".join([*stages, _sum(_terms(step))])


def _on_numbers(step: Operation) -> bool:
    return isinstance(step.left, Value) and isinstance(step.right, Value)


def _addends(step: Expression) -> list[Fraction] | None:
    """Return the signed numbers of a sum, or None if the expression is not a sum of numbers."""
    if isinstance(step, Value):
        return [step.number]
    if step.operator not in {"+", "-"}:
        return None
    left, right = _addends(step.left), _addends(step.right)
    if left is None or right is None:
        return None
    return [*left, *(right if step.operator == "+" else [-number for number in right])]


def _rewritten(step: Expression) -> Expression:
    """Return the step after one round of rewriting, which computes the innermost products, quotients and sums in brackets."""
    if isinstance(step, Value):
        return step
    if _on_numbers(step):
        return Value(_value(step))
    inner = (step.left, step.right)
    strong = step.operator not in {"+", "-"}
    # Leave sums for the last stage, unless a product or quotient needs their value.
    left, right = (
        part
        if isinstance(part, Operation) and not strong and _addends(part) is not None
        else _rewritten(part)
        for part in inner
    )
    return Operation(step.operator, left, right)


def _value(step: Expression) -> Fraction:
    if isinstance(step, Value):
        return step.number
    result = apply(step.operator, _value(step.left), _value(step.right))
    assert result is not None, "steps never divide by zero"
    return result


def _terms(step: Expression) -> list[Fraction]:
    """Return the terms whose sum is the value of a fully rewritten step."""
    addends = _addends(step)
    if addends is not None:
        # The sum of each decimal place, from the highest place down, without zeros.
        places: dict[Fraction, Fraction] = {}
        for addend in addends:
            for digit in _digits(addend):
                place = _place(digit)
                places[place] = places.get(place, Fraction(0)) + digit
        return [places[place] for place in sorted(places, reverse=True) if places[place]] or [Fraction(0)]
    assert isinstance(step, Operation)
    if step.operator != "*":
        return _digits(_value(step))
    left, right = _value(step.left), _value(step.right)
    if len(_digits(left)) < len(_digits(right)):
        left, right = right, left
    if len(_digits(right)) == 1:
        return [digit * right for digit in _digits(left)]
    return [left * digit for digit in _digits(right)]


def _place(digit: Fraction) -> Fraction:
    """Return the largest power of ten that is at most the absolute value of a number with a single non-zero digit."""
    place = Fraction(1)
    while abs(digit) >= 10 * place:
        place *= 10
    while 0 < abs(digit) < place:
        place /= 10
    return place


def _digits(number: Fraction) -> list[Fraction]:
    """Return a number as a list of terms, one for each non-zero digit. The highest place comes first: 205 becomes 200 and 5."""
    written = decimal(abs(number))
    if written is None:
        return [number]
    whole, _, part = written.partition(".")
    sign = -1 if number < 0 else 1
    digits = [Fraction(int(digit)) * 10 ** (len(whole) - 1 - k) for k, digit in enumerate(whole)]
    digits += [Fraction(int(digit), 10 ** (k + 1)) for k, digit in enumerate(part)]
    return [sign * digit for digit in digits if digit] or [Fraction(0)]


def _sum(terms: Sequence[Fraction]) -> str:
    texts = [decimal(term) or str(term) for term in terms]
    return texts[0] + "".join(text if text.startswith("-") else f"+{text}" for text in texts[1:])


def forget_last_term(written: str) -> str:
    """Return notes without their last term, as in flawed demonstrations of the agent that writes notes."""
    stages, equals, last = written.rpartition("=")
    terms = _read_terms(last)
    kept = last if terms is None or len(terms) < 2 else _sum(terms[:-1])
    return f"{stages}{equals}{kept}"


def add_up(written: str, *, carry: bool) -> str:
    """Return the sum of the last terms in notes, or `?` if the notes cannot be parsed.

    If `carry` is false, every decimal place is added separately and all carries are lost, as in flawed demonstrations of the agent
    that reads notes.
    """
    terms = _read_terms(written.rpartition("=")[2])
    if terms is None:
        return "?"
    total = sum(terms, Fraction(0))
    if carry:
        return decimal(total) or "?"
    sign = -1 if total < 0 else 1
    sums: dict[Fraction, Fraction] = {}
    for term in terms:
        for digit in _digits(term):
            place = _place(digit)
            sums[place] = sums.get(place, Fraction(0)) + sign * digit / place
    top = max(sums)
    without_carries = sign * sum(
        (place * (digit if place == top and digit >= 0 else digit % 10) for place, digit in sums.items()),
        Fraction(0),
    )
    return decimal(without_carries) or "?"


def _read_terms(text: str) -> list[Fraction] | None:
    parsed = parse_expression(text)
    return None if parsed is None else _addends(parsed)


Role = Literal["work", "add_up", "solve"]
"""The role of an agent's script. `work` writes worked notes on the step. `add_up` computes the answer from the notes. `solve` writes
the answer to the step."""


@dataclass(frozen=True, slots=True)
class CalculatorStep:
    """A calculator step in normalised form."""

    question: str
    """The expression of the step, such as `48/2`."""
    answer: str
    """The value of the step as a decimal number, such as `24`."""


class GSM8KSteps(DataFiles, Questions):
    """Calculator steps of GSM8K as questions. For example, the answer to `48/2` is `24`."""

    name: Literal["gsm8k_steps"] = "gsm8k_steps"
    path: str = "openai/gsm8k"
    config: str | None = "main"
    longest: int = Field(default=20, ge=3)
    """The maximum number of characters of a step, without its result."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("last_number",), min_length=1)
    """Rules that extract the answer from an agent's text."""
    roles: Mapping[str, Role] = Field(default={"reasoner": "work", "actor": "add_up"})
    """Mapping from an agent to the role of its script. Agents that are not listed have the role `solve`."""
    flaws: Flaws = Field(default={})
    """Mapping from an agent to the fraction of its demonstrations that contain a mistake: the role `work` omits the last of several
    terms, and the roles `add_up` and `solve` lose the carry from one decimal place to the next."""

    @property
    def answers(self) -> Answers:
        """The grader of answers. An answer is one number."""
        return numbers(self.extraction)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the files or hub splits from which the two splits are read.

        Problems occur in only one split, but a step can occur in both.
        """
        return {
            "train": f"calculator steps of {self.source.describe('train')}",
            "test": f"calculator steps of {self.source.describe('test')}",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Read both splits. Raises DataError if a split has no steps, and ConfigError if `flaws` names an unknown agent."""
        check_flaws(self.flaws, agents)
        for split in ("train", "test"):
            if not self.size(split):
                raise DataError(
                    f"The {split} split of '{self.path}' has no calculator steps (`<<48/2=24>>` in the field "
                    "`answer`). Set `environment.path` to GSM8K's files."
                )

    def size(self, split: Split) -> int | None:
        """Return the number of calculator steps in a split."""
        return len(_steps(self.source, split, self.longest))

    def task(self, split: Split, index: int) -> Task:
        """Return the step at an index. Steps are in the order of the solutions."""
        step = _steps(self.source, split, self.longest)[index]
        seen = step in _trained(self.source, self.longest)
        return Task(f"{split}-{index}", step.question, {"answer": step.answer, "seen": seen})

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return whether the step also occurs in the train split, and the operators that it contains."""
        operation = "".join(re.findall(r"(?<=[0-9)])(?://|[-+*/])", task.question))
        return {"seen": task.data["seen"], "operation": operation}

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the demonstration for the role of the agent. The fraction of demonstrations that `flaws` sets contains a mistake."""
        bad = flawed(self.flaws, agent, seed)
        role = self.roles.get(agent, "solve")
        if role == "add_up":
            return add_up(messages[-1].content if messages else "", carry=not bad)
        step = parse_expression(task.question)
        assert step is not None, "questions are written by `write`"
        worked = notes(step)
        if role == "solve":
            return add_up(worked, carry=not bad)
        return forget_last_term(worked) if bad else worked


_ANNOTATION = re.compile(r"<<([^<>]*)>>")


@lru_cache(maxsize=8)
def _steps(source: DataSource, split: Split, longest: int) -> tuple[CalculatorStep, ...]:
    """Return the calculator steps of a split that can be used as tasks."""
    steps: list[CalculatorStep] = []
    rows = source.load("question", "path").of(split)
    for annotation in (step for row in rows for step in _ANNOTATION.findall(row.text("answer", "path"))):
        left, _, right = annotation.partition("=")
        step, given = parse_expression(left), parse_expression(right)
        question = None if step is None else write(step)
        if question is None or given is None or not isinstance(step, Operation):
            continue
        result = work_out(step)
        answer = None if result is None else decimal(result)
        if answer is not None and result == work_out(given) and len(question) <= longest:
            steps.append(CalculatorStep(question, answer))
    return tuple(steps)


@lru_cache(maxsize=8)
def _trained(source: DataSource, longest: int) -> frozenset[CalculatorStep]:
    return frozenset(_steps(source, "train", longest))
