r"""Parse single values as they are written: the name, the unit and the words around a value, and its number.

Numbers have their own parser, which limits their size and never evaluates code. Numbers are compared exactly. The size of a
literal is checked before any arithmetic, so `1e400` and a number of a million digits are rejected immediately. Values are
fractions without a tolerance: 0.333 is not 1/3.

`parse_number` parses one literal: `18`, `-18`, `1,234.5`, `.5`, `3/4`, `2 1/3`, `6e3` or `\frac{3}{4}`. The literal may have
`$`, `€` or `£` before it, or `€` or `£` after it, and `%`, `pct`, `percent` or `percentage` at its end. A string that contains
anything else (a unit, a second number, an expression, `nan`) is not a number. `read_number` also accepts common additions to a
literal: a name before `=`, a plain unit after the number, and brackets. This module performs no calculations. Only
`kapelle.environments.grading.math.grade` accepts `2^3` as a number, because a question may ask for the value of `2^3`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kapelle.environments.grading.math.expression import GREEK, Unfamiliar, Unreadable
from kapelle.environments.grading.math.notation import opened, with_commas
from kapelle.environments.grading.text.extraction import GROUPS, HALVES, ExtractionRule, read_answer
from kapelle.environments.grading.verdict import Grade, right, wrong

# -------- The parts of one written value: a name before `=`, a unit after the value, or only words; in linear time

_LHS = re.compile(
    r"((?:m\s*)?\\(?:measured|spherical)?angle\s*\{?(?:[A-Z]{1,3}|[0-9])\}?|\|[A-Z](?:[A-Z]|(?:\s*\\(?:cup|cap)\s*[A-Z]){1,3})?\||\[[A-Z]{3,6}\]"
    r"|\\(?:overline|vec|hat|bar|tilde|mathbf|boldsymbol|overrightarrow|widehat|mathcal)\{[A-Za-z]{1,2}\}"
    r"|\\(?:text|mathrm)\{[A-Za-z][A-Za-z ]{,39}\}|(?:\\mathbb\{[A-Z]\}|E)\s*(?:\([A-Z]\)|\[[A-Z]\])|f\^\{-1\}|f(?=\(f\()"
    r"|\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\\[a-z]+|[A-Z]|\\angle\s*[A-Z]{1,3})|\\(?:gcd|lcm|max|min|det)\([^()=]{1,20}\)"
    r"|[A-Z]{2}|[A-Za-z]|\\(?!pi(?![A-Za-z]))[A-Za-z]+)"
    r"((?:_(?:\{[A-Za-z0-9,]+\}|[A-Za-z0-9]+|\{\\triangle\s*[A-Z]{3}\}))?)(?:\([A-Za-z](?:,\s*[A-Za-z])*\)|(\(-?[0-9]{1,6}(?:,\s*-?[0-9]{1,6})*\)|\(f\(-?[0-9]{1,6}\)\)))?"
    r"\s*(?::?=|\\in(?![A-Za-z])|\\approx(?![A-Za-z]))(?!=)\s*"
)
_TEXT = r"\\(?:text|mathrm|textnormal|textrm|textbf|textit|mbox|mathbf|operatorname)"
_ONLY_TEXT = re.compile(_TEXT + r"\{([^{}\\$]*)\}")
_FIGURES = re.compile(r"\s*[-+]?[0-9][0-9,.]*\s*")
_POWER = r"(?:\s*\^\s*\{?\s*(-?[0-9]{1,2})\s*\}?)?"
_UNIT = re.compile(rf"\s*{_TEXT}\{{\s*([^{{}}\\$]+?)\.?\s*\}}{_POWER}$")
_SHORT_UNITS = "in|ft|yd|mi|mph|kph|kmh|mm|cm|km|kg|mg|lbs?|oz|sec|min|hrs?|hours?|days?|ml|yen|rpm|mol|Hz|[MmkG]Hz|[MmkG]W|N|J|W|V"
_PLAIN_UNIT = re.compile(
    rf"(?<=[0-9)}}])\s+(?!(?:pi|sqrt|{'|'.join(GREEK)})\b)((?:[A-Za-z]{{4,}}|(?:{_SHORT_UNITS})\b)(?: [A-Za-z]+){{0,3}}|(?:k?m|ft|mi)/(?:s|h|hr)){_POWER}$"
    rf"|(?<=[0-9])\s*(cm|mm|km|kg){_POWER}$"
)
_DEGREE = re.compile(r"\s*\^\s*\{?\s*\\(?:circ|degree)\s*\}?$")
FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)\b")
"""Regular expression for a trigonometric function, which takes an angle as its argument."""
_PERCENT = re.compile(r"\s*(?:\\?%|(?<=[0-9)}\s])(?:\\text\{\s*)?(?:pct|percent(?:age)?)(?:\s*\})?)$")
_CURRENCY = re.compile(r"([-+]?)\s*(\\\$|\$|€|£|\\pounds\b|\\euro\b)\s*(?=[-+]?[0-9.\\])")
_CURRENCY_NAMES = {
    "dollar": "$",
    "dollars": "$",
    "usd": "$",
    "us dollars": "$",
    "euro": "€",
    "euros": "€",
    "eur": "€",
}
_TO_NINETEEN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen"
    " nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety hundred"
NUMBER_WORDS = {word: number for number, word in enumerate(_TO_NINETEEN.split())} | {
    word: 10 * number for number, word in enumerate(_TENS.split(), 2)
}
_WORD = re.compile(r"[A-Za-z][A-Za-z' .-]*[A-Za-z.]|[A-Za-z]|[A-Za-z]{3,}\.? [0-9]{1,4}(?:st|nd|rd|th)?")
_BETWEEN_WORDS = re.compile(r"\s*(?:,(?![0-9])|;|(?<![A-Za-z])(?:and|or)(?![A-Za-z]))\s*")


_REMARKS = (
    "not no non isn is are was be and or but if when where while unless from to by over under off out than then as at on with without"
    " more less fewer least most about approximately around almost nearly only any some all wrong incorrect false true right correct"
    " maybe perhaps probably possibly guess think even odd negative minus plus squared cubed mod modulo base factorial half halves"
    " third fourth fifth tenth hundredth thousandth percent percentage pct cent rad otherwise undefined text answer"
)
_SAYS_MORE = frozenset(_REMARKS.split())
"""Words that are not units, because they qualify the number before them or denote a part of another unit."""


def is_plain_unit(unit: str) -> bool:
    """Return whether a unit, such as `cm`, `apple`, `km/h` or `$`, is ignored if the other answer has no unit."""
    words = re.split("[ /]", unit.partition("^")[0])
    return len(words) < 5 and _SAYS_MORE.isdisjoint(words) and all(map(_UNIT_WORD.fullmatch, words))


_UNIT_WORD = re.compile(r"[A-Za-z]{2,}\.?|[mghslnjwvMGHSLNJWV$€£]")
_LONG = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inche inch", "ft": "foot feet", "yd": "yard", "mi": "mile", "g": "gram", "kg": "kilogram", "mg": "milligram", "lb": "pound lbs",
    "oz": "ounce", "s": "second sec", "min": "minute", "h": "hour hr hrs", "l": "liter litre", "ml": "milliliter millilitre",
    "rad": "radian",
}  # fmt: skip
_SHORT = (
    {f"{long}{end}": short for short, longs in _LONG.items() for long in longs.split() for end in ("", "s")}
    | {f"degree{end} {name}": name for end in ("", "s") for name in ("celsius", "fahrenheit")}
    | {"mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
    | _CURRENCY_NAMES
    | {
        f"{size} {name}{end}": f"{short}^{power}"
        for size, power in {"square": "2", "sq": "2", "sq.": "2", "cubic": "3", "cu": "3", "cu.": "3"}.items()
        for short, longs in _LONG.items()
        for name in (short, *longs.split())
        for end in ("", "s")
    }
)
"""Mapping from the long names of units to their short names."""
_SIZES: dict[str, tuple[str, Fraction]] = {
    name: (base, Fraction(size))
    for base, sizes in {
        "m": {"mm": "1/1000", "cm": "1/100", "m": "1", "km": "1000", "in": "127/5000", "ft": "381/1250", "yd": "1143/1250",
              "mi": "201168/125"},
        "s": {"s": "1", "min": "60", "h": "3600", "day": "86400", "d": "86400", "week": "604800"},
        "month": {"month": "1", "year": "12"},
        "g": {"mg": "1/1000", "g": "1", "kg": "1000"},
        "oz": {"oz": "1", "lb": "16"},
        "l": {"ml": "1/1000", "l": "1"},
        "m/s": {"m/s": "1", "km/h": "5/18", "ft/s": "381/1250", "mi/h": "1397/3125"},
        "$": {"$": "1", "cent": "1/100", "¢": "1/100"},
    }.items()
    for name, size in sizes.items()
}  # fmt: skip
"""Mapping from each unit to its base unit and the exact factor between them. Units without a fixed size are omitted."""


_CASED = re.compile(r"M(?:[A-Z]|[gms]$|b|p)|[kKGT]i?[Bb]$")


def unit_named(text: str) -> str:
    """Return the normal name of a unit, such as `km/h` for `kilometers per hour`.

    The name is in lower case, except for units such as those with `M` (mega) and `B` (bytes).
    """
    names = []
    for written in re.split(r"\s*/\s*|\bper\b", " ".join(text.split()).rstrip(".")):
        part = written.strip()
        name = part.casefold()
        if _CASED.match(part) and (not part.isupper() or name not in {*_SIZES, *_SHORT}):
            name = part.replace("K", "k")
        plural = len(name) > 3 and name.endswith("s") and not name.endswith(("ss", "us"))
        names.append(_SHORT.get(name, name[:-1] if plural else name))
    return "/".join(names)


def is_measure(unit: str) -> bool:
    """Return whether a unit measures a physical quantity such as a length, a time or a mass."""
    return unit.partition("^")[0] in {*_SIZES, "unit", "degree"}


def times(one: str, other: str) -> Fraction | None:
    """Return the factor from one unit to another, such as 10 for `cm` to `mm`, or None if they measure different quantities."""
    measured = []
    for unit in (one, other):
        name, raised, power = unit.partition("^")
        if name not in _SIZES or (raised and not power.lstrip("-").isdigit()):
            return None
        base, size = _SIZES[name]
        measured.append((f"{base}^{power or 1}", size ** int(power or 1)))
    (ours, size), (theirs, other_size) = measured
    return size / other_size if ours == theirs else None


def is_word(letters: str) -> bool:
    """Return whether letters form a word (`cat`, `HTH`, `IV`).

    Consecutive letters of the alphabet, such as `ab` and `xyz`, are a product of variables instead.
    """
    if len(letters) < 2:
        return False
    first, last = min(letters), max(letters)
    run = ord(last) - ord(first) == len(letters) - 1 and len(set(letters)) == len(letters)
    return not (letters.islower() and run) or letters in {"no", "on", "hi"}


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A single value as it is written, split into body, name and unit."""

    body: str
    name: str
    """The name before the equals sign, such as `x` in `x = 5` and `x_1` in `x_1 = 5`."""
    unit: str
    """The normal name of the unit, mostly in lower case."""


def words_of(body: str) -> list[str]:
    r"""Return the words of an answer that consists only of words, split at commas, or an empty list for mathematics.

    The words may be plain or inside `\text{…}`.
    """
    only = _ONLY_TEXT.fullmatch(body)
    if only is not None and _FIGURES.fullmatch(only[1]):
        return []
    inner = only[1] if only else body
    pieces = [piece for piece in _BETWEEN_WORDS.split(inner) if piece.strip()]
    if only is not None:
        return [_plain_words(piece) for piece in pieces] or [""]
    found = [_ONLY_TEXT.fullmatch(piece) or _WORD.fullmatch(piece) for piece in pieces]
    if not all(found) or not any(_wordy(piece) for piece in pieces):
        return []
    return [_plain_words(match[1] if match.re is _ONLY_TEXT else match[0]) for match in found if match]


def _wordy(piece: str) -> bool:
    """Return whether letters form a word rather than a product such as `xy` or a difference such as `p - q`."""
    if "-" in piece and all(len(run) < 3 for run in re.findall("[A-Za-z]+", piece)):
        return False
    return (
        " " in piece
        or len(piece) > 3
        or piece.lower() in {"yes", "no", "nan", "inf", "oo", "zoo", *NUMBER_WORDS}
    )


def _plain_words(text: str) -> str:
    words = re.sub(
        r"^(?:an?|the) (?!half|third|quarter|\w+th$)",
        "",
        " ".join(text.split()).strip("().,;: "),
        flags=re.IGNORECASE,
    )
    return words if len(words) == 1 else words.casefold()


def mathematics(body: str) -> str:
    r"""Return the mathematical content of an answer that does not consist of words, such as `5` for `\text{5}`.

    Raises Unfamiliar if the answer contains unknown characters.
    """
    only = _ONLY_TEXT.fullmatch(body)
    if only is not None:
        body = only[1].strip()
    if not body.replace("€", "").replace("£", "").isascii():
        raise Unfamiliar
    return body


def part_of(text: str) -> AnswerPart:
    """Split a single value into its body, name and unit."""
    name, body = without_name(text.strip())
    body, unit = without_unit(body)
    if not body:
        raise Unreadable("It is a name or a unit without a value.")
    return AnswerPart(body, name, unit)


def without_name(text: str) -> tuple[str, str]:
    """Return the name before the first `=` and the rest of the string; the name is empty if there is none."""
    found = _LHS.match(text)
    if found is None:
        return "", text
    rest = text[found.end() :]
    if _LHS.match(rest):
        return "", text  # `x = y = 5`: the name is ambiguous
    name = re.sub(r"[{}\s]|^m(?=\s*\\angle)", "", found[1] + found[2])
    return name + re.sub(r"\s", "", found[3] or ""), rest


def without_unit(body: str) -> tuple[str, str]:
    r"""Split a value into the value without its unit and the name of the unit.

    Raises Unfamiliar for degrees inside a function: `\cos 20^\circ` has no unit.
    """
    currency = _CURRENCY.match(body)
    if currency is not None:
        rest, unit = without_unit(currency[1] + body[currency.end() :])
        sign = {"\\$": "$", "\\pounds": "£", "\\euro": "€"}.get(currency[2], currency[2])
        # `$15 per hour`, `$15 in total`, `$15 USD`
        return rest, sign if unit in ("", sign) else f"{sign}{'' if unit[0] == '/' else ' '}{unit}"
    for pattern, unit in ((_PERCENT, "%"), (_DEGREE, "degree")):
        found = pattern.search(body)
        if found is not None and FUNCTION.search(body):
            raise Unfamiliar
        if found is not None:
            return body[: found.start()].strip(), unit
    found = _UNIT.search(body) or _PLAIN_UNIT.search(body)
    if found is None:
        return body, ""
    groups = [group for group in found.groups() if group]
    unit = unit_named(groups[0])
    return body[: found.start()].strip(), f"{unit}^{groups[1]}" if len(groups) > 1 else unit


# -------- Single numbers

MAX_CHARACTERS = 80
MAX_EXPONENT = 40

# [0-9] instead of \d, which also matches digits of other scripts; `extraction.clean` has already replaced those.
_PLAIN = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?) \s* (?P<currency>[$€£]?) \s* (?P<inner>-?)
    (?: (?P<decimal>{_PLAIN}) (?:[eE](?P<exponent>[-+]?[0-9]{{1,4}}))?
      | (?:(?P<whole>[0-9]+)[ \t]+)? (?P<top>[0-9]+) \s*/\s* (?P<bottom>[0-9]+)
      | (?:(?P<units>[0-9]+)[ \t]*)? \\[dt]?frac (?: \{{(?P<tex_top>-?[0-9]+)\}}\{{(?P<tex_bottom>[0-9]+)\}} | (?P<short>[0-9]{{2}}) )
    )
    \s* (?P<after>[€£]?) (?P<percent>%?|pct|percent(?:age)?|per[ ]cent) \.?
    """,
    re.VERBOSE,
)


_GROUPED = re.compile(rf"(?<![0-9.A-Za-z])(?:{GROUPS}|[1-9][0-9]{{0,2}}(?:\.[0-9]{{3}}){{2,}}(?![0-9.]))")
_HALF = re.compile(f"[{HALVES}]")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written: its digits, its percent sign, its currency and its unit."""

    figure: Fraction
    """The number without regard to the percent sign; for example, 50 for `50%`."""
    percent: bool = False
    currency: str = ""
    """The currency sign of the number: `$`, `€` or `£`. The currency matters only if the other answer also has one."""
    unit: str = ""
    """The plain unit after the number. The unit matters only if the other answer also has one."""

    @property
    def value(self) -> Fraction:
        """The value of the number with regard to the percent sign; for example, 1/2 for `50%`."""
        return self.figure / 100 if self.percent else self.figure


def parse_number(text: str) -> Number | None:
    """Parse a string as one number; return None if it is not a number or if the number is too large."""
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        return None
    if text.isascii() and text.isdigit():  # the most common case
        return Number(Fraction(int(text)))
    dollars = text.endswith("\\$") and text.count("$") == 1
    text = text.replace("\\$", "$").replace("\\%", "%").strip()
    while len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    text = _GROUPED.sub(lambda found: re.sub("[^0-9]", "", found[0]), text.rstrip("$ "))
    text = _HALF.sub(
        lambda found: f" {unicodedata.normalize('NFKC', found[0]).replace('⁄', '/')}", text
    ).strip()
    match = _NUMBER.fullmatch(text)
    if match is None or (match["sign"] and match["inner"]) or (match["currency"] and match["after"]):
        return None
    if match["decimal"] is not None:
        exponent = int(match["exponent"] or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        magnitude = Fraction(match["decimal"].rstrip("."))
        if exponent:
            magnitude *= Fraction(10) ** exponent
    else:
        short = match["short"]
        top = int(short[0] if short else match["top"] or match["tex_top"])
        bottom = int(short[1] if short else match["bottom"] or match["tex_bottom"])
        # `11 7/6` may be a mixed number or a mistake, so it is not a number here. `168/2` still has to be calculated.
        whole = match["whole"] or match["units"] or ""
        mixed = bool(whole)
        if bottom == 0 or (top >= bottom if mixed else bottom > 1 and top % bottom == 0):
            return None
        magnitude = int(whole or 0) + Fraction(top, bottom)
    negative = match["sign"] == "-" or match["inner"] == "-"
    # The `$` of `$50\%$` starts a formula.
    currency = "" if match["percent"] else match["currency"] or match["after"] or "$" * dollars
    return Number(-magnitude if negative else magnitude, bool(match["percent"]), currency)


def read_number(text: str) -> Number | None:
    r"""Return the number in an answer, ignoring common additions as in `x = 5`, `5\text{ cm}`, `90^\circ` and `(5)`.

    Returns None for any other answer, including an answer with a unit that is not plain (`cents`, `squared`).
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
    if written.unit and written.unit != "%" and not is_plain_unit(written.unit):
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
"""A symmetric function that returns whether two numbers are considered the same answer."""


def same_value(one: Number, other: Number) -> bool:
    """Return whether two numbers have the same value, with percent as hundredths: 50% equals 1/2, not 50."""
    return one.value == other.value and _one_unit(one, other)


def same_figure(one: Number, other: Number) -> bool:
    """Return whether two numbers have the same digits, with percent as a unit: 50% equals 50, not 1/2.

    This comparison suits datasets in which the questions name the unit (`What percentage …?`) and the answers omit it.
    """
    return one.figure == other.figure and _one_unit(one, other)


def _one_unit(one: Number, other: Number) -> bool:
    marks = [number.currency + "%" * number.percent or number.unit for number in (one, other)]
    return marks[0] == marks[1] or not all(marks)


def grade_numeric(text: str, gold: Number, rules: Sequence[ExtractionRule], same: Same = same_value) -> Grade:
    """Return a verdict with score 1 if the final number of a text equals the gold number, otherwise with score 0."""
    number = read_answer(text, rules, read_number, "not a single number")
    if isinstance(number, Grade):
        return number
    answer = normal_form(number)
    return right(answer) if same(number, gold) else wrong(answer, normal_form(gold))


def normal_form(number: Number) -> str:
    """Return a number as a string in normal form, such as `18`, `-3/4` or `50%`."""
    return f"{number.figure}{'%' if number.percent else ''}"
