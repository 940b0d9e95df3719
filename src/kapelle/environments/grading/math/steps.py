"""Split a worked solution into steps and check each step, to label training data for process reward models.

A solution is searched for equations such as `120+12=132` or `48/2=24` in running text, in the annotations `<<48/2=24>>` of
GSM8K, and in chains of equations. Each `=` ends a step, and a step is correct if both sides of the equation have the same
value. If the question is itself a calculation (`47+85`) and the solution begins with an equation, the first side of that
equation is also a step and must have the value of the question.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from kapelle.environments.grading.math.calculation import parse_expression, work_out

_NUMBER = r"[-−(]*+\$?+(?:\d++(?:,\d{3})*+(?:\.\d++)?+|\.\d++)[%)]*+"
_SIDE = re.compile(rf"{_NUMBER}(?: ?+[-+*/×÷−] ?+{_NUMBER})*+")  # possessive: each character is read once
_EQUALS = re.compile(" ?= ?")


@dataclass(frozen=True, slots=True)
class WorkedStep:
    """A step of a worked solution."""

    end: int
    """The number of characters of the solution up to the end of this step."""
    right: bool
    """Whether this step and all previous steps are correct. Steps after a mistake do not count as progress (arXiv:2305.20050)."""


def worked_steps(question: str, solution: str) -> list[WorkedStep]:
    """Return the steps of a solution in order, or an empty list if the solution contains no equation.

    A decimal result may be rounded: `10/3=3.33` is correct. A step is incorrect if one of its sides cannot be parsed or divides
    by zero.
    """
    asked = _worth(question)
    steps: list[WorkedStep] = []
    sound = True
    sides = list(_SIDE.finditer(solution))
    joined = [
        _EQUALS.fullmatch(solution, left.end(), right.start()) is not None for left, right in pairwise(sides)
    ]
    before: Fraction | None = None
    for number, side in enumerate(sides):
        follows = number > 0 and joined[number - 1]
        begins = not follows and number < len(joined) and joined[number]
        worth = _worth(side[0]) if follows or begins else None
        if follows:
            sound = sound and _same(before, worth, side[0])
            steps.append(WorkedStep(side.end(), sound))
        elif begins and asked is not None and not solution[: side.start()].strip():
            sound = sound and worth == asked
            steps.append(WorkedStep(side.end(), sound))
        before = worth
    return steps


def _worth(text: str) -> Fraction | None:
    parsed = parse_expression(text)
    return None if parsed is None else work_out(parsed)


def _same(left: Fraction | None, right: Fraction | None, written: str) -> bool:
    if left is None or right is None:
        return False
    decimals = re.fullmatch(r"[^.]*\.(\d+)[^.\d]*", written.strip())
    unit = Fraction(1, 10 ** len(decimals[1])) if decimals else Fraction(0)
    return abs(left - right) <= unit / 2
