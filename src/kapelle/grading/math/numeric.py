r"""Numbers in answers: a bounded parser of its own and exact comparison.

Nothing is evaluated. The size of a literal is bounded before any arithmetic is done with it, so neither
`1e400` nor a million digits cost anything. Values are fractions: 0.333 is not 1/3, and there is no
tolerance to hide in.

What `parse_number` reads is one literal: `18`, `-18`, `1,234.5`, `.5`, `3/4`, `2 1/3`, `6e3`, `\frac{3}{4}`, with `$`,
`€` or `£` before it, or `€` or `£` behind it, and `%`, `pct`, `percent` or `percentage` at its end. A text
with anything else in it (a unit, a second number, an expression, `nan`) is not one. `read_number` reads what people
put around a literal, too: a name before `=`, a plain unit behind, brackets. Nothing is worked out here: `2^3` is a
number to `kapelle.grading.math.grade` alone, because to a question that asks for `2^3` it is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kapelle.grading.math.expression import Unfamiliar, Unreadable
from kapelle.grading.math.notation import opened, with_commas
from kapelle.grading.math.parts import PLAIN_UNITS, mathematics, part_of, words_of
from kapelle.grading.text.extraction import ExtractionRule, read_answer
from kapelle.grading.verdict import Grade, right, wrong

MAX_CHARACTERS = 80
MAX_EXPONENT = 40

# Digits are spelled [0-9]: \d would take every script's digits, which `extraction.clean` has made plain.
_PLAIN = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?:[ ][0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?) \s* (?P<currency>[$€£]?) \s* (?P<inner>-?)
    (?: (?P<decimal>{_PLAIN}) (?:[eE](?P<exponent>[-+]?[0-9]{{1,4}}))?
      | (?:(?P<whole>[1-9][0-9]{{0,2}}(?:[ ,][0-9]{{3}})+|[0-9]+)[ \t]+)? (?P<top>[0-9]+) \s*/\s* (?P<bottom>[0-9]+)
      | \\[dt]?frac (?: \{{(?P<tex_top>-?[0-9]+)\}}\{{(?P<tex_bottom>[0-9]+)\}} | (?P<short>[0-9]{{2}}) )
    )
    \s* (?P<after>[€£]?) (?P<percent>%?|pct|percent(?:age)?) \.?
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Number:
    """One number as written: its figure, and whether a percent sign stood behind it."""

    figure: Fraction
    """The number without regard to the percent sign: 50 for `50%`."""
    percent: bool = False
    currency: str = ""
    """`$`, `€` or `£` where one stands before it. It counts only against another one."""
    unit: str = ""
    """A plain unit behind it, which counts only against another one, too."""

    @property
    def value(self) -> Fraction:
        """What it is worth: 1/2 for `50%`."""
        return self.figure / 100 if self.percent else self.figure


def parse_number(text: str) -> Number | None:
    """Return the one number that a text is, or None when it is anything else or too large to consider."""
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        return None
    dollars = text.endswith("\\$") and text.count("$") == 1
    text = text.replace("\\$", "$").replace("\\%", "%").replace("\\!", "").replace("{,}", ",").strip()
    while len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    text = text.rstrip("$ ")
    match = _NUMBER.fullmatch(text)
    if match is None or (match["sign"] and match["inner"]) or (match["currency"] and match["after"]):
        return None
    if match["decimal"] is not None:
        exponent = int(match["exponent"] or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        magnitude = Fraction(re.sub("[, ]", "", match["decimal"]).rstrip(".")) * Fraction(10) ** exponent
    else:
        short = match["short"]
        top = int(short[0] if short else match["top"] or match["tex_top"])
        bottom = int(short[1] if short else match["bottom"] or match["tex_bottom"])
        # `11 7/6` may be a mixed number or a slip: it is not decided here.
        if bottom == 0 or (match["whole"] and top >= bottom):
            return None
        magnitude = int(re.sub("[ ,]", "", match["whole"] or "0")) + Fraction(top, bottom)
    negative = match["sign"] == "-" or match["inner"] == "-"
    currency = match["currency"] or match["after"] or ("$" if dollars else "")
    return Number(-magnitude if negative else magnitude, bool(match["percent"]), currency)


def read_number(text: str) -> Number | None:
    r"""Return the number in an answer, with what people write around it: `x = 5`, `5\text{ cm}`, `90^\circ`, `(5)`.

    A unit that is no plain one (`million`, `cents`) makes it something else, and None.
    """
    plain = parse_number(text)
    if plain is not None or len(text) > MAX_CHARACTERS:
        return plain
    try:
        body = opened(text)
        if words_of(body) or ", " in (body := with_commas(mathematics(body))):
            return None
        written = part_of(body)
    except (Unreadable, Unfamiliar):
        return None
    if written.unit and written.unit not in {"%", *PLAIN_UNITS}:
        return None
    bare = _BRACKETS.fullmatch(written.body)
    number = parse_number(bare[1] if bare else written.body)
    if number is None or (number.percent and written.unit):
        return None
    if written.unit in {"$", "€", "£"}:
        return None if number.currency else replace(number, currency=written.unit)
    unit = "" if written.unit == "%" else written.unit
    return replace(number, percent=number.percent or written.unit == "%", unit=unit)


_BRACKETS = re.compile(r"[({]([^(){}]*)[)}]")


Same = Callable[[Number, Number], bool]
"""Whether two numbers count as the same answer; symmetric."""


def same_value(one: Number, other: Number) -> bool:
    """Return whether both are worth the same: 50% is 1/2 and is not 50."""
    return one.value == other.value and _one_unit(one, other)


def same_figure(one: Number, other: Number) -> bool:
    """Return whether both show the same figure, a percent sign being a mere unit: 50% is 50, not 1/2.

    For data whose questions name the unit (`What percentage …?`) and whose answers leave it out.
    """
    return one.figure == other.figure and _one_unit(one, other)


def _one_unit(one: Number, other: Number) -> bool:
    marks = [number.currency + "%" * number.percent or number.unit for number in (one, other)]
    return marks[0] == marks[1] or not all(marks)


def grade_numeric(text: str, gold: Number, rules: Sequence[ExtractionRule], same: Same = same_value) -> Grade:
    """Return whether the final number of a text is the gold one: score 1 or 0, nothing between."""
    number = read_answer(text, rules, read_number, "not one number")
    if isinstance(number, Grade):
        return number
    answer = normal_form(number)
    return right(answer) if same(number, gold) else wrong(answer, normal_form(gold))


def normal_form(number: Number) -> str:
    """Return the one way in which a number is written for comparison: `18`, `-3/4`, `50%`."""
    return f"{number.figure}{'%' if number.percent else ''}"
