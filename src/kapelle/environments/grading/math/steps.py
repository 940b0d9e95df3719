"""Splits a worked solution into steps and recomputes each step, to label data for models that judge solutions step by step.

A solution is searched for equations such as `120+12=132` or `48/2=24`, wherever they occur: in running text, in GSM8K's
annotations `<<48/2=24>>`, or in a chain. Each `=` ends a step, which is correct if both of its sides have the same value.
If the question is itself a calculation (`47+85`) and the solution begins with an equation, the first side of that equation is a
step too and must have the value of the question.
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
    """One step of a solution."""

    end: int
    """Number of characters of the solution up to the end of this step."""
    right: bool
    """Whether this step and all steps before it are correct; steps after a mistake do not count as progress (arXiv 2305.20050)."""


def worked_steps(question: str, solution: str) -> list[WorkedStep]:
    """Return the steps of a solution in order; empty if it has no equation.

    A result with decimals may be rounded: `10/3=3.33` is correct. A step with a side that cannot be parsed or divides by zero is
    incorrect.
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
