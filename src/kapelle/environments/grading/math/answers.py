"""Parse mathematical answers: numbers, expressions, lists, sets, intervals, points, matrices and words.

`read_answer` parses a string and never executes it as code. `sameness.py` compares two parsed answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fractions import Fraction
from itertools import accumulate, pairwise

from kapelle.environments.grading.math import algebra
from kapelle.environments.grading.math.algebra import Quotient
from kapelle.environments.grading.math.expression import (
    NotAnAnswer,
    Seen,
    Unfamiliar,
    Unreadable,
    read_expression,
)
from kapelle.environments.grading.math.notation import (
    opened,
    split_marked,
    split_top,
    split_word,
    with_commas,
)
from kapelle.environments.grading.math.numeric import (
    NUMBER_WORDS,
    AnswerPart,
    is_measure,
    is_plain_unit,
    is_word,
    mathematics,
    parse_number,
    part_of,
    times,
    unit_named,
    without_name,
    without_unit,
    words_of,
)

# -------- The parts of mathematical answers: numbers, lists, sets, intervals, points, matrices, words


@dataclass(frozen=True, slots=True)
class WordAnswer:
    """An answer that is a name or a sentence, in lower case if it has more than one letter."""

    text: str


@dataclass(frozen=True, slots=True)
class Infinity:
    """The end of an interval at infinity."""

    positive: bool


@dataclass(frozen=True, slots=True)
class Based:
    """An integer in another base, written as digits and a base: `1012_3`."""

    digits: str
    """The digits of the integer, with its sign and without leading zeros."""
    base: int


@dataclass(frozen=True, slots=True)
class Equation:
    """An equation, stored as the difference of its sides; the equation states that this difference is 0."""

    difference: Quotient
    left: Quotient | None = field(default=None, compare=False)
    """The left side of the equation. The right side is `left` minus `difference`."""


@dataclass(frozen=True, slots=True)
class Several:
    """A collection of values of one of the following kinds.

    A `list` has values in any order and may contain repetitions. A `set` has values in any order without repetitions. A
    `vector` has values in a fixed order. The kinds `()`, `(]`, `[)` and `[]` are points or intervals, whose values have a fixed
    order. A `union` has intervals in any order. A `ratio` has three or more values in a fixed order and is defined up to a
    common factor. A `mod` is a pair of the least nonnegative residue and the modulus. A `named` collection has values with
    names, such as `x = 1, y = 2`, in the order of the names of the answer. A `row` is one row of a matrix, and a `matrix` is a
    sequence of rows; both have a fixed order.
    """

    kind: str
    items: tuple[Value, ...]


Value = Quotient | WordAnswer | Infinity | Based | Equation | Several


@dataclass(frozen=True, slots=True)
class MathAnswer:
    """A parsed mathematical answer."""

    value: Value
    name: str
    """The name before the equals sign, such as `x` in `x = 5` or `x,y` in `x = 1, y = 2`; empty if the answer has no name."""
    unit: str
    """The normal name of the unit; empty if the answer has no unit."""
    letters: frozenset[str]
    """The letters that occur in the written value, including letters that cancel."""
    plain: str = ""
    """The written value if it consists only of letters, such as `odd`, which may be a word or a product; otherwise empty."""
    unfinished: bool = False
    """Whether part of the answer still has to be calculated, as in `3 + 4`. False for an equation with unknowns."""


# -------- Inequalities become intervals, and chains of equal values become one value
#
# `-2 \le x < 7` is `x \in [-2, 7)`, `|x| > 3` is two intervals, and `x = 5 + 6 = 11` is 11. A chain that contradicts itself has
# no value. This part does not read inequalities in several unknowns.

Read = Callable[[str], Quotient]
"""A function that parses one expression. The function raises Unreadable if the expression must not be accepted, and Unfamiliar
if it cannot be parsed."""

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
"""Maximum number of characters in a decimal number that is compared as a rounded value."""


def has_relation(body: str) -> bool:
    """Return whether a string contains an inequality."""
    return _RELATION.search(body) is not None


def read_bounds(body: str, read: Read) -> tuple[str, Value]:
    """Return the variable that an inequality bounds, and the intervals of this variable.

    Raises Unreadable if the inequality must not be accepted, and Unfamiliar if it cannot be parsed.
    """
    parts, marks = split_marked(body, _RELATION)
    if any(_UNEQUAL.fullmatch(mark) for mark in marks):
        # `x \ne 5` stands for all numbers except 5.
        sides = [part.strip() for part in parts]
        if len(sides) != 2:
            raise Unfamiliar
        subject = _SUBJECT.fullmatch(sides[0])
        end = _end(sides[1], read, subject["name"]) if subject and not subject["bar"] else None
        if subject is None or end is None:
            raise Unfamiliar
        return subject["name"], without((end,))
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
    assert moved is not None, "infinity is never added to a name"
    # In `|x - 1| < 3`, an absolute value is bounded: each bound gives two ends, shifted by the number that is added to the name.
    for end in ends:
        if end is not None and (end.rational is None or end.rational < 0):
            raise Unfamiliar
    left, right = (algebra.negate(end) if end is not None else None for end in ends[::-1])
    if ends[0] is None:
        of_size = _interval((left, ends[1]), (shut[1], shut[1]))
    else:
        of_size = Several("union", (_interval((left, right), shut[::-1]), _interval(ends, shut)))
    return subject["name"], _moved(of_size, algebra.negate(moved))


def both(bounds: Sequence[tuple[str, Value]]) -> tuple[str, Value]:
    r"""Return a variable and the interval given by two bounds on this variable, such as `x \ge 0` and `x < 2`.

    Raises Unfamiliar for any other bounds.
    """
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


def without(values: Sequence[Quotient]) -> Several:
    """Return the set of all real numbers except the given values.

    Raises Unfamiliar if several values are given and one of them contains letters.
    """
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
"""One end of an interval, or None if the interval is unbounded on this side."""


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


_OPERATION = re.compile(r"(?<=[0-9A-Za-z)}])\s*(?:[-+*/^(]|\\(?:cdot|times|div)\b)")


def shortens(text: str, value: Quotient) -> bool:
    """Return whether a decimal number is the given value, rounded or truncated to the digits of the decimal number.

    Returns False if the value is not a real number.
    """
    exact = algebra.decimal(value)
    if exact is None or len(text) > MAX_DIGITS or not _DECIMAL.fullmatch(text):
        return False
    digits = len(text.partition(".")[2])
    step = Decimal(1).scaleb(-digits)
    return Decimal(text) in {
        exact.quantize(step, rounding, algebra.PRECISION) for rounding in (ROUND_HALF_UP, ROUND_DOWN)
    }


MAX_ITEMS = 32
"""Maximum number of items of a list. The limit exists because items are compared in pairs."""

_AMOUNT = re.compile(
    r"([-+]?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+|/[1-9][0-9]*)?)\s*([A-Za-z]+(?: [A-Za-z]+){0,2}?)(?:\s*[,;])?(?:\s+and(?![A-Za-z]))?(?:\s+|$)(?=[-+0-9]|$)"
)
_IN_TEXT = re.compile(r"\\(?:text|mathrm)\{([^{}]*)\}")


def _amounts(body: str) -> MathAnswer | None:
    """Return the sum of amounts such as `5 feet 3 inches`, or several named amounts such as `3 red, 4 blue`.

    Returns None if the string does not consist of at least two amounts.
    """
    plain = _IN_TEXT.sub(r" \1 ", body).strip()
    found = list(_AMOUNT.finditer(plain))
    if len(found) < 2 or "".join(each[0] for each in found) != plain:
        return None
    units = ["min" if each[2] == "m" and "h" in plain else unit_named(each[2]) for each in found]
    # Letters may be part of a product: `2 x, 3 y`.
    if not all(is_measure(unit) or (len(unit) > 2 and is_plain_unit(unit)) for unit in units):
        return None
    numbers = [Fraction(each[1].replace(",", "")) for each in found]
    factors = [times(unit, units[-1]) for unit in units]
    if None not in factors:
        total = sum(number * (factor or 0) for number, factor in zip(numbers, factors, strict=True))
        return MathAnswer(algebra.number(Fraction(total)), "", units[-1], frozenset())
    if len(set(units)) < len(units):
        raise Unfamiliar
    return MathAnswer(Several("named", tuple(map(algebra.number, numbers))), ",".join(units), "", frozenset())


def read_answer(text: str) -> MathAnswer:
    """Parse a string as an answer.

    Raises Unreadable if the string must not be accepted as an answer, and Unfamiliar if this parser cannot read it.
    """
    body = opened(text)
    amounts = _amounts(body)
    if amounts is not None:
        return amounts
    words = words_of(body)
    if len(words) == 1 and (spoken := in_figures(words[0])):
        return _Reading().answer(spoken)
    if words:
        values: list[Value] = []
        for each in words:
            figures = in_figures(each)
            values.append(
                algebra.number(Fraction(figures)) if figures.isdigit() else _SAID.get(each, WordAnswer(each))
            )
        return MathAnswer(_listing(tuple(values)), "", "", frozenset())
    return _Reading().answer(mathematics(body))


def in_figures(words: str) -> str:
    """Convert a number in words at the start of a phrase to digits, such as `21 days` for `twenty-one days`.

    A unit after the number is returned as a LaTeX text command. Returns an empty string for other words.
    """
    first, *others = words.replace("-", " ").split(" ")
    if first == "half" and not others:
        return "1/2"
    if first in {"a", "an"} and len(others) == 1 and others[0] in PARTS:
        first = "one"
    if first not in NUMBER_WORDS:
        return ""
    number = NUMBER_WORDS[first]
    if others and number >= 20 and number < 100 and 0 < NUMBER_WORDS.get(others[0], 0) < 10:
        number += NUMBER_WORDS[others.pop(0)]
    if others and others[0] == "hundred" and number < 100:
        number *= 100
        others.pop(0)
    if not others:
        return str(number)
    if len(others) == 1 and others[0].removesuffix("s") in PARTS and number:
        return f"{number}/{PARTS[others[0].removesuffix('s')]}"
    # A unit may follow; a sentence may not.
    unit = " ".join(others)
    return rf"{number}\text{{ {unit}}}" if is_plain_unit(unit_named(unit)) else ""


PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4} | {
    word: number
    for number, word in enumerate(["fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"], 4)
}
"""Mapping from words for fractional parts, such as `third`, to the number of these parts in a whole."""


class _Reading:
    """A parser for one answer that records the notation of this answer."""

    def __init__(self) -> None:
        self.seen = Seen()

    def answer(self, body: str) -> MathAnswer:
        """Parse an entire answer: bounds joined by `or`, groups separated by `;`, or a single list."""
        sides, bounds = split_word(body, "or"), list[tuple[str, Value]]()
        for side in sides:
            if has_relation(side):
                found = [read_bounds(each, self._single) for each in split_word(side, "and")]
                bounds.append(found[0] if len(found) == 1 else both(found))
        if bounds and len(bounds) == len(sides) and len({name for name, _ in bounds}) == 1:
            # A union consists of intervals.
            intervals = [
                item
                for _, value in bounds
                for item in (value.items if isinstance(value, Several) and value.kind == "union" else [value])
            ]
            return self._made(
                bounds[0][0], bounds[0][1] if len(bounds) == 1 else Several("union", tuple(intervals))
            )
        if bounds or has_relation(body):
            raise Unfamiliar
        body = with_commas(body)
        groups = [group.strip() for group in split_top(body, ";")]
        if len(groups) == 1:
            return self._listed(body)
        # `x = 1; y = 2` is one solution; `1, 2; 3, 4` are two solutions.
        if all(without_name(group)[0] and len(split_top(group, ",")) == 1 for group in groups):
            return self._listed(", ".join(groups))
        answers = [self._listed(group) for group in groups]
        if len({(answer.name, answer.unit) for answer in answers}) > 1:
            raise Unfamiliar
        return self._made(
            answers[0].name, Several("list", tuple(answer.value for answer in answers)), answers[0].unit
        )

    def _made(self, name: str, value: Value, unit: str = "", plain: str = "") -> MathAnswer:
        unfinished = self.seen.unfinished and not isinstance(value, Equation)
        return MathAnswer(value, name, unit, frozenset(self.seen.letters), plain, unfinished)

    def _listed(self, body: str) -> MathAnswer:
        """Parse values separated by commas, a single value, or an equation."""
        # A number itself may contain commas: `1,234`.
        one = part_of(body)
        whole = parse_number(one.body)
        if whole is not None:
            return self._made(one.name, algebra.number(whole.figure), one.unit)
        # Names that belong to several values: `a:b:c = 1:2:3`, `P(3, 4)`, `(x, y) = (1, 2)`.
        ratio = _NAMED_RATIO.fullmatch(body)
        if ratio is not None:
            return self._made(re.sub(r"\s", "", ratio[1]), _listing(tuple(self._item(ratio[2]))))
        called = _CALLED.fullmatch(body)
        if called is not None and len(split_top(called[2][1:-1], ",")) > 1:
            return self._made(called[1], _listing(self._items(split_top(called[2], ","))))
        named = _POINT.match(body)
        if named is not None:
            letters = ",".join(letter.strip() for letter in named[1].split(","))
            return self._made(letters, _listing(self._items(split_top(body[named.end() :], ","))))
        if len(split_top(body, ",")) == 1 and not without_name(body)[0] and len(split_top(body, "=")) > 1:
            # An equation, or a value written as an equation: `\binom{5}{2} = 10`, `2x = y`.
            sides = split_top(body, "=")
            last, unit = without_unit(sides[-1].strip())
            name, nothing = without_name(f"{last}=")
            if len(sides) == 2 and name and not (nothing or unit):
                return self._listed(f"{last} = {sides[0]}")
            sides = [*sides[:-1], last]
            if unit == "%" and self._worked_out([*sides[:-1], rf"\frac{{{last}}}{{100}}"]):
                return self._made("", self._single(last), unit)
            number = self._worked_out(sides)
            if number is not None:
                return self._made("", number, unit)
            if len(sides) != 2:
                raise Unreadable("It contains several equations.")
            left, right = (self._single(side) for side in sides)
            try:
                equation = Equation(algebra.add(left, algebra.negate(right)), left)
            except algebra.TooLarge:
                raise Unreadable("It is too large.") from None
            return self._made("", equation, unit)
        parts = [self._chained(part_of(text)) for text in split_top(body, ",")]
        if len(parts) > MAX_ITEMS:
            raise Unreadable(f"It lists more than {MAX_ITEMS} values.")
        several = len(parts) > 1
        values = [tuple(self._item(part.body, among_others=several)) for part in parts]
        return self._gathered(parts, values)

    def _gathered(self, parts: Sequence[AnswerPart], values: Sequence[tuple[Value, ...]]) -> MathAnswer:
        """Return several values as one answer, depending on their names.

        In `x = 1, 2`, all values share a name. `x_1 = 1, x_2 = 2` is a list, and `x = 1, y = 2` is a single solution.
        """
        items = tuple(value for several in values for value in several)
        # Either all values have the same unit, or only the last value has a unit.
        units, unit, names = {part.unit for part in parts}, parts[-1].unit, [part.name for part in parts]
        if len(units) > 1 and (units != {"", unit} or any(part.unit for part in parts[:-1])):
            raise Unfamiliar
        distinct = sorted(set(names))
        if len(distinct) == 1 or not any(names[1:]):
            solid = parts[0].body.replace(" ", "")
            plain = solid if len(parts) == 1 and solid.isalpha() else ""
            return self._made(names[0], _listing(items), unit, plain)
        if "" in distinct or len(distinct) < len(parts) or len(items) > len(parts):
            raise Unfamiliar
        letters = {name.partition("_")[0] for name in names}
        if len(letters) == 1:
            return self._made(letters.pop(), Several("list", items), unit)
        return self._made(",".join(names), Several("named", items), unit)

    def _chained(self, part: AnswerPart) -> AnswerPart:
        """Reduce a chain of equal values, such as `x = 5 + 6 = 11`, to its last exact side, and return the part with this value.

        Raises NotAnAnswer if the chain contradicts itself: its numbers differ and no side is a calculation, or the number after
        a `≈` is not the rounded or truncated value before the `≈`. If a side is a calculation, the last side counts, even after
        incorrect steps.
        """
        if not _ABOUT.search(part.body):
            return part
        if not part.name and "=" in part.body:
            raise Unfamiliar
        sides, marks = split_marked(part.body, _ABOUT)
        sides = [side.strip() for side in sides]
        exact = 1 + next((place for place, mark in enumerate(marks) if mark != "="), len(marks))
        values, unfinished = self._apart(sides[:exact])
        worked_out = any(_OPERATION.search(side) for side in sides[:exact])
        if not worked_out and not all(value.same(values[-1]) for value in values):
            raise NotAnAnswer("It contradicts itself.")
        if not all(shortens(side.lstrip("\\$ "), values[-1]) for side in sides[exact:]):
            raise NotAnAnswer("Its approximate value differs from its exact value.")
        # The last finished side that equals the last side.
        place = max(
            range(exact), key=lambda side: (not unfinished[side] and values[side].same(values[-1]), side)
        )
        return AnswerPart(sides[place], part.name, part.unit)

    def _worked_out(self, sides: list[str]) -> Quotient | None:
        """Return the common number of all sides of an equation, or None if the equation has unknowns, is false or is trivial."""
        ratios = ["/" in side or "frac" in side for side in sides]
        if all(parse_number(side) is not None for side in sides) and len(set(ratios)) == 1:
            return None  # `5 = 5` carries no information
        values, unfinished = self._apart(sides)
        self.seen.unfinished = all(unfinished)
        same = all(value.rational is not None and value.same(values[0]) for value in values)
        return values[0] if same and not self.seen.letters else None

    def _apart(self, sides: Sequence[str]) -> tuple[list[Quotient], list[bool]]:
        """Return the value of each side of an equation, and whether each side still has to be calculated."""
        values, unfinished = list[Quotient](), list[bool]()
        for side in sides:
            self.seen.unfinished = False
            values.append(self._single(side))
            unfinished.append(self.seen.unfinished)
        self.seen.unfinished = False
        return values, unfinished

    def _single(self, text: str) -> Quotient:
        values = read_expression(text, self.seen)
        if len(values) != 1:
            raise Unreadable("It contains a ± in an equation.")
        return values[0]

    def _items(self, parts: Sequence[str]) -> tuple[Value, ...]:
        if len(parts) > MAX_ITEMS:
            raise Unreadable(f"It lists more than {MAX_ITEMS} values.")
        return tuple(value for part in parts for value in self._item(part.strip()))

    def _item(self, text: str, *, among_others: bool = True) -> Sequence[Value]:
        """Parse the string between two commas as the first kind of value that fits; an expression with `±` has two values."""
        if not text:
            raise Unreadable("A value is missing between commas.")
        if among_others and text.isalpha() and text.isascii() and is_word(text):
            return [WordAnswer(text.casefold() if len(text) > 2 else text)]
        if _INFINITY.fullmatch(text):
            return [Infinity(not text.startswith("-"))]
        if text in _SIGNS:
            return [_SIGNS[text]]
        based = _BASED.fullmatch(text)
        if based is not None and based[2][0].isdigit():
            sign, digits, base = based[1], based[2], int(based[3])
            if not 2 <= base <= 36 or any(int(digit, 16) >= base for digit in digits):
                raise Unreadable("It contains digits that do not exist in its base.")
            if base == 10:
                return [algebra.number(Fraction(int(sign + digits)))]
            bare = digits.lstrip("0")
            return [Based(sign + bare if bare else "0", base)]
        if _INDEXED.search(text):
            raise Unreadable("A number has an index that is not a base.")
        ratio = split_top(text, ":")
        if len(ratio) > 2:
            return [Several("ratio", tuple(self._single(part) for part in ratio))]
        rest = _MODULO.fullmatch(text)
        if rest is not None:
            # A number modulo another number: 10 and 3 are equal modulo 7.
            whole, modulus = self._single(rest[1]).rational, int(rest[2])
            if whole is None or whole.denominator != 1:
                raise Unfamiliar
            residue = algebra.number(Fraction(whole.numerator % modulus))
            return [Several("mod", (residue, algebra.number(Fraction(modulus))))]
        matrix = _MATRIX.fullmatch(text)
        if matrix is not None:
            rows = matrix[2].strip().removesuffix("\\\\").split("\\\\")
            return [Several("matrix", tuple(Several("row", self._items(row.split("&"))) for row in rows))]
        reals = _BUT.fullmatch(text)
        if reals is not None:
            return [without([self._single(part) for part in split_top(reals[1], ",")])]
        bracketed = _bracketed(text)
        if bracketed is None:
            return read_expression(text, self.seen)
        kind, parts = bracketed
        return [Several(kind, self._items(parts))]


_POINT = re.compile(r"\(\s*([A-Za-z](?:\s*,\s*[A-Za-z])+)\s*\)\s*=(?!=)\s*")
_CALLED = re.compile(r"([A-Z])\s*(\((?:[^()]|\([^()]*\))*\))")
"""Regular expression for a point after its name: `P(3, 4)`."""
_MATRIX = re.compile(r"\\begin\{([pb]?)matrix\}((?:(?!\\begin).)*)\\end\{\1matrix\}", re.DOTALL)
_NAMED_RATIO = re.compile(r"([A-Za-z](?:\s*:\s*[A-Za-z]){2,7})\s*=\s*([^=]{5,200})")
_MODULO = re.compile(
    r"([^\\]{1,40}?)\s*\(?\s*\\(?:pmod|bmod|mod)(?![A-Za-z])\s*\{?\s*([1-9][0-9]{0,17})\s*\}?\s*\)?"
)
_BASED = re.compile(r"(-?)([0-9A-F]{1,64})_\{?([0-9]{1,2})\}?")
_INDEXED = re.compile(r"[0-9]\s*_")
_BUT = re.compile(r"\\mathbb\{R\}\s*(?:\\setminus|\\backslash|\\smallsetminus|-)\s*\\\{([^{}]+)\\\}")
_INFINITY = re.compile(r"([-+]?)\s*\\infty")


_EVERY = (
    "all real numbers",
    "all reals",
    "all real x",
    "all real values",
    "the real numbers",
    "the set of real numbers",
)
_NOTHING = ("no solution", "no solutions", "empty set", "the empty set")
_SAID: dict[str, Value] = {
    **dict.fromkeys([*_EVERY, "the set of all real numbers", "set of all real numbers"], REALS),
    **dict.fromkeys(_NOTHING, Several("set", ())),
}
"""Mapping from phrases to the values that they denote."""
_SIGNS: dict[str, Value] = {
    **dict.fromkeys(("\\emptyset", "\\varnothing"), Several("set", ())),
    "\\mathbb{R}": REALS,
}
"""Mapping from single symbols to the values that they denote."""


def _listing(items: tuple[Value, ...]) -> Value:
    return items[0] if len(items) == 1 else Several("list", items)


def _bracketed(text: str) -> tuple[str, list[str]] | None:
    if text.startswith("\\vector(") and text.endswith(")"):
        return "vector", split_top(text[8:-1], ",")
    joined = split_top(text, "\\cup")
    if len(joined) > 1:
        return "union", joined
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2].strip()
        return "set", split_top(inner, ",") if inner else []
    if (text[0] in "([" and text[-1] in ")]") or (text[0] == "{" and text[-1] == "}"):
        # In `(1)(2)`, the last bracket does not close the first one.
        depths = [0, *accumulate((mark in "([{") - (mark in ")]}") for mark in text[1:-1])]
        inside = split_top(text[1:-1].replace(";", ","), ",") if min(depths) == depths[-1] == 0 else []
        if len(inside) > 1:
            return "set" if text[0] == "{" else text[0] + text[-1], inside
    return None
