r"""Reads what a mathematical answer is: numbers, expressions, lists, sets, intervals, points, matrices, words.

`read_answer` takes a text apart without evaluating any of it; `sameness.py` compares two readings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from kapelle.grading.math import algebra, relations
from kapelle.grading.math.algebra import Quotient
from kapelle.grading.math.expression import Refused, Unfamiliar, read_expression
from kapelle.grading.math.numeric import parse_number
from kapelle.grading.math.parts import (
    NUMBER_WORDS,
    PLAIN_UNITS,
    Part,
    is_word,
    mathematics,
    part_of,
    without_name,
    without_unit,
    words_of,
)
from kapelle.grading.math.text import alternatives, opened, split_top, together, with_commas
from kapelle.grading.math.values import Answer, Based, Equation, Infinity, Several, Value, Words

MAX_ITEMS = 32
"""Items of one list; they are matched pair by pair."""


def read_answer(text: str) -> Answer:
    """Return the value that a text writes. Raises Refused for what must not be read as an answer, Unfamiliar for the rest."""
    body = opened(text)
    words = words_of(body)
    if len(words) == 1 and (spoken := in_figures(words[0])):
        return _Reading().answer(spoken)
    if words:
        values = [_said(each) for each in words]
        return Answer(values[0] if len(values) == 1 else Several("list", tuple(values)), "", "", frozenset())
    return _Reading().answer(mathematics(body))


def _said(words: str) -> Value:
    figures = in_figures(words)
    return algebra.number(Fraction(figures)) if figures.isdigit() else _SAID.get(words, Words(words))


def in_figures(words: str) -> str:
    """Return words that begin with a number with its figures, `21 days` for `twenty-one days`; empty for others."""
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
    return (
        rf"{number}\text{{ {unit}}}" if unit in PLAIN_UNITS or (len(others) == 1 and unit.isalpha()) else ""
    )


PARTS = {
    "half": 2,
    "halve": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
}
"""What a number of words counts, and how many of them are a whole."""


class _Reading:
    """One reading, with the letters that it has met."""

    def __init__(self) -> None:
        self.letters: set[str] = set()

    def answer(self, body: str) -> Answer:
        sides = [self._alternative(side) for side in alternatives(body)]
        bounds = [side for side in sides if side is not None]
        if bounds and len(bounds) == len(sides) and len({name for name, _ in bounds}) == 1:
            values = [value for _, value in bounds]
            return self._made(
                bounds[0][0], values[0] if len(values) == 1 else Several("union", _flat(values))
            )
        if bounds or relations.has_relation(body):
            raise Unfamiliar
        body = with_commas(body)
        groups = [group.strip() for group in split_top(body, ";")]
        if len(groups) == 1:
            return self._listed(body)
        if all(without_name(group)[0] and len(split_top(group, ",")) == 1 for group in groups):
            return self._listed(", ".join(groups))
        answers = [self._listed(group) for group in groups]
        if len({(answer.name, answer.unit) for answer in answers}) > 1:
            raise Unfamiliar
        return self._made(
            answers[0].name, Several("list", tuple(answer.value for answer in answers)), answers[0].unit
        )

    def _made(self, name: str, value: Value, unit: str = "", plain: str = "") -> Answer:
        return Answer(value, name, unit, frozenset(self.letters), plain)

    def _alternative(self, body: str) -> tuple[str, Value] | None:
        if not relations.has_relation(body):
            return None
        bounds = [relations.read_bounds(each, self._single) for each in together(body)]
        return bounds[0] if len(bounds) == 1 else relations.both(bounds)

    def _listed(self, body: str) -> Answer:
        one = part_of(body)
        whole = parse_number(one.body)
        if whole is not None:
            return self._made(one.name, algebra.number(whole.figure), one.unit)
        ratio = _NAMED_RATIO.fullmatch(body)
        if ratio is not None:
            return self._made(re.sub(r"\s", "", ratio[1]), _listing(tuple(self._item(ratio[2]))))
        called = _CALLED.fullmatch(body)
        if called is not None and len(split_top(called[2][1:-1], ",")) > 1:
            return self._made(called[1], _listing(self._items(called[2])))
        named = _POINT.match(body)
        if named is not None:
            letters = ",".join(letter.strip() for letter in named[1].split(","))
            return self._made(letters, _listing(self._items(body[named.end() :])))
        if len(split_top(body, ",")) == 1 and not without_name(body)[0] and len(split_top(body, "=")) > 1:
            return self._of_sides(split_top(body, "="))
        parts = [self._chained(part_of(text)) for text in split_top(body, ",")]
        if len(parts) > MAX_ITEMS:
            raise Refused(f"It lists more than {MAX_ITEMS} values.")
        several = len(parts) > 1
        values = [tuple(self._item(part.body, among_others=several)) for part in parts]
        return self._gathered(parts, values)

    def _gathered(self, parts: Sequence[Part], values: Sequence[tuple[Value, ...]]) -> Answer:
        items = tuple(value for several in values for value in several)
        unit, names = _common_unit(parts), [part.name for part in parts]
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

    def _chained(self, part: Part) -> Part:
        """Return a part whose value is written several times, `x = 5 + 6 = 11`, with the value once."""
        if not relations.has_chain(part.body):
            return part
        if not part.name and "=" in part.body:
            raise Unfamiliar
        return Part(relations.read_chain(part.body, self._single), part.name, part.unit)

    def _of_sides(self, sides: list[str]) -> Answer:
        r"""Return an equation, or what it is a longer way to write: `\binom{5}{2} = 10`, `2x = y`."""
        last, unit = without_unit(sides[-1].strip())
        name, nothing = without_name(f"{last}=")
        if len(sides) == 2 and name and not (nothing or unit):
            return self._listed(f"{last} = {sides[0]}")
        sides = [*sides[:-1], last]
        if unit == "%" and self._worked_out([*sides[:-1], rf"\frac{{{last}}}{{100}}"]):
            return self._made("", self._single(last), unit)
        return self._made("", self._worked_out(sides) or self._equation(sides), unit)

    def _worked_out(self, sides: list[str]) -> Quotient | None:
        """Return the number that all sides are; None for what says more than that, or is wrong."""
        if all(parse_number(side) is not None for side in sides) and len(set(map(_is_ratio, sides))) == 1:
            return None  # `5 = 5` says nothing
        values = [self._single(side) for side in sides]
        same = all(value.rational is not None and value.same(values[0]) for value in values)
        return values[0] if same and not self.letters else None

    def _equation(self, sides: list[str]) -> Equation:
        if len(sides) != 2:
            raise Refused("It holds several equations.")
        left, right = (self._single(side) for side in sides)
        try:
            return Equation(algebra.add(left, algebra.negate(right)), left)
        except algebra.TooLarge:
            raise Refused("It is larger than any answer that is considered.") from None

    def _single(self, text: str) -> Quotient:
        values = read_expression(text, self.letters)
        if len(values) != 1:
            raise Refused("It holds ± in an equation.")
        return values[0]

    def _items(self, body: str) -> tuple[Value, ...]:
        parts = split_top(body, ",")
        if len(parts) > MAX_ITEMS:
            raise Refused(f"It lists more than {MAX_ITEMS} values.")
        return tuple(value for part in parts for value in self._item(part.strip()))

    def _item(self, text: str, *, among_others: bool = True) -> Sequence[Value]:
        if not text:
            raise Refused("Something is missing between commas.")
        if among_others and text.isalpha() and text.isascii() and is_word(text):
            return [Words(text.casefold() if len(text) > 2 else text)]
        single = _atom(text)
        if single is not None:
            return [single]
        ratio = split_top(text, ":")
        if len(ratio) > 2:
            return [Several("ratio", tuple(self._single(part) for part in ratio))]
        rest = _MODULO.fullmatch(text)
        if rest is not None:
            return [_residue(self._single(rest[1]), int(rest[2]))]
        matrix = _MATRIX.fullmatch(text)
        if matrix is not None:
            rows = matrix[2].strip().removesuffix("\\\\").split("\\\\")
            return [Several("matrix", tuple(self._several("row", row.split("&")) for row in rows))]
        reals = _BUT.fullmatch(text)
        if reals is not None:
            return [relations.without([self._single(part) for part in split_top(reals[1], ",")])]
        parts = _bracketed(text)
        return [self._several(*parts)] if parts is not None else list(read_expression(text, self.letters))

    def _several(self, kind: str, parts: Sequence[str]) -> Several:
        if len(parts) > MAX_ITEMS:
            raise Refused(f"It lists more than {MAX_ITEMS} values.")
        return Several(kind, tuple(value for part in parts for value in self._item(part.strip())))


_POINT = re.compile(r"\(\s*([A-Za-z](?:\s*,\s*[A-Za-z])+)\s*\)\s*=(?!=)\s*")
_CALLED = re.compile(r"([A-Z])\s*(\((?:[^()]|\([^()]*\))*\))")
"""A point behind its name: `P(3, 4)`."""
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
    **dict.fromkeys([*_EVERY, "the set of all real numbers", "set of all real numbers"], relations.REALS),
    **dict.fromkeys(_NOTHING, Several("set", ())),
}
"""What words mean that are also written as mathematics."""


def _residue(value: Quotient, modulus: int) -> Several:
    """Return a number modulo another one: 10 and 3 modulo 7 are the same."""
    whole = value.rational
    if whole is None or whole.denominator != 1:
        raise Unfamiliar
    return Several(
        "mod", (algebra.number(Fraction(whole.numerator % modulus)), algebra.number(Fraction(modulus)))
    )


def _is_ratio(text: str) -> bool:
    return "/" in text or "frac" in text


def _listing(items: tuple[Value, ...]) -> Value:
    return items[0] if len(items) == 1 else Several("list", items)


def _flat(values: Sequence[Value]) -> tuple[Value, ...]:
    """Return the intervals of which several, and unions, consist."""
    return tuple(
        item
        for value in values
        for item in (value.items if isinstance(value, Several) and value.kind == "union" else (value,))
    )


def _common_unit(parts: Sequence[Part]) -> str:
    """Return the one unit of all values: each has it, or it stands behind the last. Raises Unfamiliar for several."""
    units = {part.unit for part in parts}
    if len(units) == 1 or (units == {"", parts[-1].unit} and not any(part.unit for part in parts[:-1])):
        return parts[-1].unit
    raise Unfamiliar


def _atom(text: str) -> Value | None:
    if _INFINITY.fullmatch(text):
        return Infinity(not text.startswith("-"))
    if text in {"\\emptyset", "\\varnothing"}:
        return Several("set", ())
    if text == "\\mathbb{R}":
        return relations.REALS
    based = _BASED.fullmatch(text)
    if based is not None and based[2][0].isdigit():
        return _based(based[1], based[2], int(based[3]))
    if _INDEXED.search(text):
        raise Refused("A number has an index that is no base.")
    return None


def _bracketed(text: str) -> tuple[str, list[str]] | None:
    joined = split_top(text, "\\cup")
    if len(joined) > 1:
        return "union", joined
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2].strip()
        return "set", split_top(inner, ",") if inner else []
    if (text[0] in "([" and text[-1] in ")]") or (text[0] == "{" and text[-1] == "}"):
        # `(1)(2)` opens with a bracket and ends with another one.
        inside = split_top(text[1:-1].replace(";", ","), ",") if _balanced(text[1:-1]) else []
        if len(inside) > 1:
            return "set" if text[0] == "{" else text[0] + text[-1], inside
    return None


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _based(sign: str, digits: str, base: int) -> Value:
    if not 2 <= base <= 36 or any(int(digit, 16) >= base for digit in digits):
        raise Refused("Its digits are not of its base.")
    if base == 10:
        return algebra.number(Fraction(int(sign + digits)))
    bare = digits.lstrip("0") or "0"
    return Based(sign + bare if bare != "0" else bare, base)
