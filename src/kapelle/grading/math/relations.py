r"""Inequalities as the intervals that they describe, and chains of equal values as the value.

`-2 \le x < 7` is `x \in [-2, 7)`, `|x| > 3` is two intervals, `x = 5 + 6 = 11` is 11. A chain that contradicts itself is
refused. Inequalities in several unknowns are not read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from itertools import pairwise

from kapelle.grading.math import algebra
from kapelle.grading.math.algebra import Quotient
from kapelle.grading.math.expression import Nothing, Unfamiliar
from kapelle.grading.math.text import split_marked
from kapelle.grading.math.values import Infinity, Several, Value

Read = Callable[[str], Quotient]
"""Reads one expression. Raises Refused and Unfamiliar."""

_LESS, _GREATER = r"<|\\lt(?![A-Za-z])", r">|\\gt(?![A-Za-z])"
_UNEQUAL = re.compile(r"\\neq?(?![A-Za-z])|!=|\\not\s*=")
_RELATION = re.compile(
    rf"<=|>=|\\leq?(?:slant)?(?![A-Za-z])|\\geq?(?:slant)?(?![A-Za-z])|{_LESS}|{_GREATER}|{_UNEQUAL.pattern}"
)
_SUBJECT = re.compile(
    r"(?P<bar>\|)?\s*(?P<name>[A-Za-z]|\\[a-z]+)(?:\([a-z](?:,\s*[a-z])*\))?\s*(?(bar)(?P<moved>[-+][^|]+)?\|)"
)
_ABOUT = re.compile(r"\\approx(?![A-Za-z])|=")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
MAX_DIGITS = 50
"""Characters of a decimal number that is compared with what it rounds."""


def has_relation(body: str) -> bool:
    """Return whether an inequality stands in a text."""
    return _RELATION.search(body) is not None


def read_bounds(body: str, read: Read) -> tuple[str, Value]:
    """Return the name of what an inequality bounds, and where it lies. Raises Refused and Unfamiliar."""
    parts, marks = split_marked(body, _RELATION)
    if any(_UNEQUAL.fullmatch(mark) for mark in marks):
        return _all_but(parts, read)
    up = [mark.startswith(("<", "\\l")) for mark in marks]
    closed = ["=" in mark or "e" in mark for mark in marks]
    if len(set(up)) != 1 or len(parts) > 3:
        raise Unfamiliar
    if not up[0]:
        parts, closed = parts[::-1], closed[::-1]
    sides = [part.strip() for part in parts]
    subjects = [_SUBJECT.fullmatch(side) for side in sides]
    if len(sides) == 2:
        place = 0 if subjects[0] else 1
        low, high = (None, sides[1]) if place == 0 else (sides[0], None)
        shut = (False, closed[0]) if place == 0 else (closed[0], False)
    else:
        place, (low, high), shut = 1, (sides[0], sides[2]), (closed[0], closed[1])
    subject = subjects[place]
    if subject is None or (len(sides) == 2 and subjects[1 - place]):
        raise Unfamiliar
    ends = (_end(low, read, subject["name"]), _end(high, read, subject["name"]))
    if not subject["bar"]:
        return subject["name"], _interval(ends, shut)
    moved = _end(subject["moved"] or "0", read, subject["name"])
    assert moved is not None, "no infinity stands behind a name"
    return subject["name"], _moved(_of_size(ends, shut), algebra.negate(moved))


def both(bounds: Sequence[tuple[str, Value]]) -> tuple[str, Value]:
    r"""Return what two bounds of one name say together: `x \ge 0` and `x < 2`. Raises Unfamiliar for anything else."""
    names = {name for name, _ in bounds}
    intervals = [value for _, value in bounds if isinstance(value, Several) and len(value.kind) == 2]
    low = [each for each in intervals if isinstance(each.items[1], Infinity)]
    high = [each for each in intervals if isinstance(each.items[0], Infinity)]
    if len(names) > 1 or len(bounds) != 2 or (len(low), len(high)) != (1, 1):
        raise Unfamiliar
    ends = low[0].items[0], high[0].items[1]
    if isinstance(ends[0], Infinity) or isinstance(ends[1], Infinity):
        raise Unfamiliar
    return names.pop(), Several(low[0].kind[0] + high[0].kind[1], ends)


def _all_but(parts: list[str], read: Read) -> tuple[str, Value]:
    r"""Return what `x \ne 5` leaves."""
    sides = [part.strip() for part in parts]
    if len(sides) != 2:
        raise Unfamiliar
    subject = _SUBJECT.fullmatch(sides[0])
    end = _end(sides[1], read, subject["name"]) if subject and not subject["bar"] else None
    if subject is None or end is None:
        raise Unfamiliar
    return subject["name"], without((end,))


def without(values: Sequence[Quotient]) -> Several:
    """Return the real numbers other than these. Raises Unfamiliar for letters."""
    placed = {}
    for value in values:
        exact = algebra.decimal(value)
        if exact is None and len(values) > 1:
            raise Unfamiliar
        placed[exact] = value
    ends: list[End] = [None, *(placed[exact] for exact in sorted(placed, key=lambda each: each or 0)), None]
    return Several("union", tuple(_interval(pair, (False, False)) for pair in pairwise(ends)))


REALS = Several("()", (Infinity(positive=False), Infinity(positive=True)))


def _moved(value: Several, by: Quotient) -> Several:
    items = (
        _moved(item, by)
        if isinstance(item, Several)
        else algebra.add(item, by)
        if isinstance(item, Quotient)
        else item
        for item in value.items
    )
    return Several(value.kind, tuple(items))


End = Quotient | None
"""One end of an interval; None where it has none."""


def _end(text: str | None, read: Read, name: str) -> End:
    if text is None or re.fullmatch(r"[-+]?\s*\\infty", text):
        return None
    value = read(text)
    if any(
        letter == name
        for terms in (value.top, value.bottom)
        for _, _, powers in terms
        for letter, _ in powers
    ):
        raise Unfamiliar
    return value


def _interval(ends: tuple[End, End], closed: tuple[bool, bool]) -> Several:
    low, high = ends
    kind = ("[" if closed[0] else "(") + ("]" if closed[1] else ")")
    return Several(kind, (low or Infinity(positive=False), high or Infinity(positive=True)))


def _of_size(ends: tuple[End, End], closed: tuple[bool, bool]) -> Several:
    """Return where a number lies whose size is bounded."""
    low, high = ends
    for end in ends:
        if end is not None and (end.rational is None or end.rational < 0):
            raise Unfamiliar
    left, right = (algebra.negate(end) if end is not None else None for end in (high, low))
    if low is None:
        return _interval((left, high), (closed[1], closed[1]))
    return Several("union", (_interval((left, right), closed[::-1]), _interval(ends, closed)))


def has_chain(body: str) -> bool:
    r"""Return whether a text has several sides, by `=` or `\approx`."""
    return _ABOUT.search(body) is not None


def read_chain(body: str, read: Read) -> str:
    """Return the side that has the value of a chain: the last one that is exact. Raises Nothing where it contradicts itself.

    Numbers that differ contradict one another, unless a side is worked out (`x = 5 + 6 = 11`): then what it ends with
    counts, as it does behind wrong steps. What stands behind `≈` has to round or cut what stands before it.
    """
    sides, marks = split_marked(body, _ABOUT)
    sides = [side.strip() for side in sides]
    exact = 1 + next((place for place, mark in enumerate(marks) if mark != "="), len(marks))
    values = [read(side) for side in sides[:exact]]
    worked_out = any(_OPERATION.search(side) for side in sides[:exact])
    if not worked_out and not all(value.same(values[-1]) for value in values):
        raise Nothing("It contradicts itself.")
    if not all(shortens(side.lstrip("\\$ "), values[-1]) for side in sides[exact:]):
        raise Nothing("It names a value and another one as about the same.")
    return sides[exact - 1]


_OPERATION = re.compile(r"(?<=[0-9A-Za-z)}])\s*(?:[-+*/^(]|\\(?:cdot|times|div)\b)")


def shortens(text: str, value: Quotient) -> bool:
    """Return whether a decimal number is a value rounded or cut to its digits; False for a value that is no real number."""
    exact = algebra.decimal(value)
    if exact is None or len(text) > MAX_DIGITS or not _DECIMAL.fullmatch(text):
        return False
    digits = len(text.partition(".")[2])
    step = Decimal(1).scaleb(-digits)
    return Decimal(text) in {
        exact.quantize(step, rounding, algebra.PRECISION) for rounding in (ROUND_HALF_UP, ROUND_DOWN)
    }
