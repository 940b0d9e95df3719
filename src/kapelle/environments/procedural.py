"""Generated problems: equations and inequalities, chains of calculations, and small word problems."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from kapelle.environments.grading.math.numeric import MAX_CHARACTERS, parse_number
from kapelle.environments.grading.text.extraction import ExtractionRule
from kapelle.environments.questions import (
    Answers,
    Difficulty,
    Generated,
    Problem,
    describe,
    numbers,
    up_to,
    words,
)
from kapelle.types import Message, Split, Task

# -------- Equations and inequalities in one unknown: the solution of `3x+5=20` is `x=5`, that of `4-2x>10` is `x<-3`.
#
# Levels: (1) one step, (2) two steps, (3) the unknown on both sides, (4) brackets, and fractions in the answer,
# (5) a quadratic with whole roots (equations) or fractions on both sides (inequalities).

Kind = Literal["equation", "inequality"]
_DIGITS = re.compile(r"\d+")
"""A regular expression for numbers, which are replaced with `#` to obtain the template of a problem."""
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "="}


class Algebra(Generated):
    """Equations and inequalities with the unknown `x`. The answer lists all roots, or gives a bound such as `x<-3`."""

    name: Literal["algebra"] = "algebra"
    kinds: tuple[Kind, ...] = Field(default=("equation",), min_length=1)
    """The kinds of problems. The kind of each task is sampled uniformly."""
    difficulty: Annotated[Difficulty, up_to(5)] = (1, 3)
    """The minimum and maximum difficulty, from 1 to 5."""
    seed: int = 0
    """The seed of the task generator. Different seeds generate different tasks in a different order, but the split of a problem does
    not depend on the seed."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("hash", "last_box", "whole"), min_length=1)
    """Rules that extract the answer from an agent's text."""

    @property
    def answers(self) -> Answers:
        """The grader of answers. An answer consists of all roots, or of a bound."""
        return words(solution, self.extraction, "no solution such as `x=5`, `2,3` or `x<-3`")

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the generated problems of each split. A hash of each problem determines its split."""
        many = {"equation": "equations", "inequality": "inequalities"}
        return describe(" and ".join(many[kind] for kind in self.kinds), self.difficulty, self.held_out)

    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return a random problem of the given level."""
        kind = draw.choice(self.kinds)
        if (kind, level) == ("equation", 5):
            one, other = draw.randint(-9, 9), draw.randint(-9, 9)
            question = f"x^2{_term(-(one + other), 'x')}{_term(one * other, '')}=0"
            answer = f"x={','.join(map(str, sorted({one, other})))}"
        else:
            question, answer = _linear(draw, level, kind)
        return Problem(question, {"answer": answer}, question, _DIGITS.sub("#", question))


_ROOT = re.compile(r"(?:x\s*=\s*)?(?P<number>[^=<>≤≥]+)")
_BOUND = re.compile(r"(?P<left>[^=<>≤≥]+?)\s*(?P<sign><=|>=|<|>|≤|≥)\s*(?P<right>[^=<>≤≥]+)")


def solution(text: str) -> str | None:
    """Return a solution in normalised form, such as `x=2`, `x=2,3` or `x<=-1/2`, or None if the text is not a solution."""
    text = text.strip().strip("$").strip().removesuffix(".")
    if len(text) > MAX_CHARACTERS:
        return None
    bound = _BOUND.fullmatch(text)
    if bound is not None:
        sign = bound["sign"].replace("≤", "<=").replace("≥", ">=")
        left, right = bound["left"].strip(), bound["right"].strip()
        if "x" not in (left, right):
            return None
        limit = parse_number(right if left == "x" else left)
        if limit is None or limit.percent or limit.currency:
            return None
        return f"x{sign if left == 'x' else _TURNED[sign]}{limit.figure}"
    roots = set()
    for part in re.split(r"\s*(?:,|;|\bor\b|\band\b)\s*", text):
        match = _ROOT.fullmatch(part.strip())
        number = None if match is None else parse_number(match["number"])
        if number is None or number.percent or number.currency:
            return None
        roots.add(number.figure)
    return f"x={','.join(map(str, sorted(roots)))}"


def _linear(draw: random.Random, level: int, kind: Kind) -> tuple[str, str]:
    """Return an equation or inequality between p·x+q and r·x+s, and its solution."""
    while True:
        left, p, q = _side(draw, level)
        right, r, s = _other_side(draw, level, p, q)
        if p != r:
            break
    sign = "=" if kind == "equation" else draw.choice(("<", ">", "<=", ">="))
    value = (s - q) / (p - r)
    kept = sign if p > r else _TURNED[sign]
    return f"{left}{sign}{right}", f"x{kept}{value}"


def _side(draw: random.Random, level: int) -> tuple[str, Fraction, Fraction]:
    a = Fraction(1) if level == 1 else Fraction(draw.choice([k for k in range(-9, 10) if k not in (0, 1)]))
    b = Fraction(draw.choice([k for k in range(-20, 21) if k]))
    if level < 4:
        return f"{_coefficient(a)}x{_term(b, '')}", a, b
    c = Fraction(draw.randint(-9, 9))
    if level == 4:
        return f"{_coefficient(a)}(x{_term(b, '')}){_term(c, '')}", a, a * b + c
    under = Fraction(draw.randint(2, 6))
    return f"({_coefficient(a)}x{_term(b, '')})/{under}", a / under, b / under


def _other_side(draw: random.Random, level: int, p: Fraction, q: Fraction) -> tuple[str, Fraction, Fraction]:
    """Return the right side of an equation or inequality. Up to level 3, the solution is a whole number."""
    if level > 3:
        return _side(draw, level)
    root = draw.randint(-12, 12)
    if level < 3:
        value = p * root + q
        return str(value), Fraction(0), value
    r = Fraction(draw.choice([k for k in range(-9, 10) if k not in (0, p)]))
    s = p * root + q - r * root
    return f"{_coefficient(r)}x{_term(s, '')}", r, s


def _coefficient(a: Fraction) -> str:
    return {Fraction(1): "", Fraction(-1): "-"}.get(a, str(a))


def _term(a: int | Fraction, unknown: str) -> str:
    if a == 0:
        return ""
    size = "" if abs(a) == 1 and unknown else str(abs(a))
    return f"{'+' if a > 0 else '-'}{size}{unknown}"


# -------- Chains of small calculations from left to right: `7 add 5 times 3 take 4` is 32.
#
# Each agent of a team can do one step, and a single mistake changes the result. The difficulty is the number of steps.


Step = Literal["add", "take", "times", "over"]


class MultiStep(Generated):
    """Chains of calculations with whole numbers. All values, including intermediate values, are from 0 to `largest`."""

    things: ClassVar[str] = "chains of calculations"
    name: Literal["multi_step"] = "multi_step"
    difficulty: Annotated[Difficulty, up_to(20)] = (2, 4)
    """The minimum and maximum number of calculations in a chain, from 1 to 20."""
    largest: int = Field(default=99, ge=20)
    """The maximum value after each calculation."""
    steps: tuple[Step, ...] = Field(default=("add", "take", "times"), min_length=1)
    """The kinds of calculations. Each calculation is sampled uniformly from the kinds whose result stays in range. `over` divides by a
    number from 2 to 9 without a remainder."""
    seed: int = 0
    """The seed of the task generator. Different seeds generate different tasks in a different order, but the split of a problem does
    not depend on the seed."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("last_number",), min_length=1)
    """Rules that extract the answer from an agent's text."""

    @model_validator(mode="after")
    def _can_continue(self) -> MultiStep:
        if missing := {"add", "take"} - set(self.steps):
            raise ValueError(
                f"`steps: {list(self.steps)}` lacks `{min(missing)}`, without which a chain cannot stay in range. Add it."
            )
        return self

    @property
    def answers(self) -> Answers:
        """The grader of answers. An answer is one number."""
        return numbers(self.extraction)

    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return a random chain of `level` calculations."""
        value = draw.randint(1, 20)
        words, values, kinds = [str(value)], [], []
        for _ in range(level):
            word, operand, value = draw.choice(_moves(value, self.largest, self.steps, draw))
            words.append(f"{word} {operand}")
            kinds.append(word)
            values.append(value)
        question = " ".join(words)
        return Problem(question, {"answer": value, "values": values}, question, " ".join(kinds))

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the value after each calculation. The last value is the answer."""
        return " ".join(map(str, task.data["values"]))


def _moves(
    value: int, largest: int, steps: Sequence[Step], draw: random.Random
) -> list[tuple[str, int, int]]:
    """Return a random calculation of each kind whose result stays in range, as (word, operand, result)."""
    add = draw.randint(1, 9)
    take = draw.randint(1, 9)
    factor = draw.choice((2, 3))
    moves: list[tuple[Step, int, int]] = []
    if value + add <= largest:
        moves.append(("add", add, value + add))
    if value - take >= 0:
        moves.append(("take", take, value - take))
    if value and value * factor <= largest:
        moves.append(("times", factor, value * factor))
    if "over" in steps and (even := [each for each in range(2, 10) if value and value % each == 0]):
        divisor = draw.choice(even)
        moves.append(("over", divisor, value // divisor))
    return [move for move in moves if move[0] in steps]  # `add` or `take` always stays in range


# -------- Small word problems like those of GSM8K: how many things remain after purchases, gifts and shares.
#
# The difficulty is the number of steps. Only the numbers and steps decide the split, so a test problem never reappears in
# training with different names and things.

_NAMES = ("Ada", "Ben", "Chen", "Dina", "Emre", "Femi", "Gita", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
_THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps", "stickers")


class WordProblems(Generated):
    """Short stories with `difficulty` steps. Answers are from 0 to 999."""

    things: ClassVar[str] = "stories"
    name: Literal["word_problems"] = "word_problems"
    difficulty: Annotated[Difficulty, up_to(8)] = (1, 3)
    """The minimum and maximum number of steps in a story, from 1 to 8."""
    seed: int = 0
    """The seed of the task generator. Different seeds generate different tasks in a different order, but the split of a problem does
    not depend on the seed."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("hash", "last_box", "last_number"), min_length=1)
    """Rules that extract the answer from an agent's text."""

    @property
    def answers(self) -> Answers:
        """The grader of answers. An answer is one number."""
        return numbers(self.extraction)

    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return a random story with `level` steps."""
        name, things = draw.choice(_NAMES), draw.choice(_THINGS)
        value = draw.randint(2, 60)
        sentences, worked = [f"{name} has {value} {things}."], []
        for _ in range(level):
            sentence, calculation, value = draw.choice(_events(value, things, draw))
            sentences.append(sentence)
            worked.append(f"{calculation}={value}")
        question = " ".join([*sentences, f"How many {things} does {name} have now?"])
        template = ";".join(_DIGITS.sub("#", step.partition("=")[0]) for step in worked)
        return Problem(question, {"answer": value, "steps": worked}, ";".join(worked), template)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the calculation of every step, and the answer after `####`, as in GSM8K."""
        return "\n".join([*task.data["steps"], f"#### {task.data['answer']}"])


def _events(value: int, things: str, draw: random.Random) -> list[tuple[str, str, int]]:
    """Return the possible next events of a story, as (sentence, calculation, number of things after the event)."""
    bought, given = draw.randint(2, 40), draw.randint(1, max(1, min(value, 40)))
    times, bags, each = draw.choice((2, 3, 4)), draw.randint(2, 5), draw.randint(2, 9)
    events = []
    if value + bought < 1000:
        events.append((f"Then {bought} more are bought.", f"{value}+{bought}", value + bought))
    if value + bags * each < 1000:
        events.append(
            (f"Next come {bags} bags of {each} {things} each.", f"{value}+{bags}*{each}", value + bags * each)
        )
    if 0 < given <= value:
        events.append((f"{given} of the {things} are given away.", f"{value}-{given}", value - given))
    if value and value * times < 1000:
        times_over = {2: "twice", 3: "three times", 4: "four times"}[times]
        events.append((f"A prize makes it {times_over} as many.", f"{value}*{times}", value * times))
    if value and value % times == 0:
        events.append(
            (
                f"They are shared evenly among {times} people, and one share is kept.",
                f"{value}/{times}",
                value // times,
            )
        )
    return events
