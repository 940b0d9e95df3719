"""Equations and inequalities in one unknown: `3x+5=20` is `x=5`, `4-2x>10` is `x<-3`.

Levels: 1 one step, 2 two steps, 3 the unknown on both sides, 4 with brackets and fractions in the answer,
5 a quadratic with whole roots (equations) or fractions on both sides (inequalities).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from kapelle.environments.questions import Answers, Difficulty, Generated, Problem, describe, up_to, words
from kapelle.grading.math.numeric import MAX_CHARACTERS, parse_number
from kapelle.grading.text.extraction import ExtractionRule
from kapelle.types import Split

Kind = Literal["equation", "inequality"]
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "="}


class Algebra(Generated):
    """One line with the unknown `x`; the answer is every root, or the side of a bound."""

    name: Literal["algebra"] = "algebra"
    kinds: tuple[Kind, ...] = Field(default=("equation",), min_length=1)
    """Drawn evenly for each task."""
    difficulty: Annotated[Difficulty, up_to(5)] = (1, 3)
    """Easiest and hardest level, 1 to 5."""
    seed: int = 0
    """Another seed gives other tasks in another order; the split of the problems stays."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("hash", "last_box", "whole"), min_length=1)
    """Where an answer is looked for in an agent's text."""

    @property
    def answers(self) -> Answers:
        """Every root, or the side of a bound."""
        return words(solution, self.extraction, "no solution such as `x=5`, `2,3` or `x<-3`")

    @property
    def sources(self) -> Mapping[Split, str]:
        """Generated; a hash of each problem decides its split."""
        many = {"equation": "equations", "inequality": "inequalities"}
        return describe(" and ".join(many[kind] for kind in self.kinds), self.difficulty)

    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return a line of a level."""
        kind = draw.choice(self.kinds)
        if (kind, level) == ("equation", 5):
            one, other = draw.randint(-9, 9), draw.randint(-9, 9)
            question = f"x^2{_term(-(one + other), 'x')}{_term(one * other, '')}=0"
            answer = f"x={','.join(map(str, sorted({one, other})))}"
        else:
            question, answer = _linear(draw, level, kind)
        return Problem(question, {"answer": answer}, question)


_ROOT = re.compile(r"(?:x\s*=\s*)?(?P<number>[^=<>≤≥]+)")
_BOUND = re.compile(r"(?P<left>[^=<>≤≥]+?)\s*(?P<sign><=|>=|<|>|≤|≥)\s*(?P<right>[^=<>≤≥]+)")


def solution(text: str) -> str | None:
    """Return a solution in its normal form, `x=2`, `x=2,3` or `x<=-1/2`; None for anything else."""
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
    """Return a line whose two sides are p·x+q and r·x+s, and its solution."""
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
    """Return the right side; up to level 3 it is chosen so that the solution is a whole number."""
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
