"""Decide whether two mathematical answers are the same.

The comparison is exact and symmetric, and it considers the order of values only where the order matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from kapelle.environments.grading.math import algebra
from kapelle.environments.grading.math.algebra import Monomial, Polynomial, Quotient, TooLarge
from kapelle.environments.grading.math.answers import (
    Based,
    Equation,
    Infinity,
    MathAnswer,
    Several,
    Value,
    WordAnswer,
    read_answer,
)
from kapelle.environments.grading.math.expression import Unfamiliar, Unreadable
from kapelle.environments.grading.math.notation import MAX_CHARACTERS, tidy
from kapelle.environments.grading.math.numeric import is_plain_unit, is_word, parse_number, times
from kapelle.environments.grading.text.match import plain_text

Percent = Literal["figure", "hundredths"]
"""How a percentage is compared with a number. With `figure`, 50% equals 50, for questions that name the unit. With
`hundredths`, 50% equals 1/2."""


def same_answer(one: MathAnswer, other: MathAnswer, percent: Percent = "figure") -> bool:
    """Return whether two answers are the same; the comparison is symmetric.

    A name or a plain unit matters only if both answers have one. Two answers differ if they contain different letters, even if
    these letters cancel.
    """
    if isinstance(one.value, Equation) or isinstance(other.value, Equation):
        return _same_equation(one, other) or _is_sum(one, other) or _is_sum(other, one)
    if one.plain and other.plain and (is_word(one.plain) or is_word(other.plain)):
        # Letters that form a word are compared in order; case is ignored in words of three or more letters.
        same = one.plain == other.plain or (
            min(len(one.plain), len(other.plain)) > 2 and one.plain.casefold() == other.plain.casefold()
        )
        return same and one.unit == other.unit and not (one.name and other.name and one.name != other.name)
    return _same_values(one, _renamed(one, other), percent)


def _renamed(one: MathAnswer, other: MathAnswer) -> MathAnswer:
    r"""Return the other answer with its letter renamed if this letter is an arbitrary integer, such as k in `k\pi`."""
    missing, extra = one.letters - other.letters, other.letters - one.letters
    if len(missing) != 1 or len(extra) != 1:
        return other
    (new,), (old,) = missing, extra
    if not {new, old} <= set("kmnl") or not (_counts_pi(one.value, new) and _counts_pi(other.value, old)):
        return other
    assert isinstance(other.value, Quotient), "only a quotient has terms"
    top, bottom = (
        {
            (
                root,
                imaginary,
                tuple(sorted((new if name == old else name, power) for name, power in letters)),
            ): (factor)
            for (root, imaginary, letters), factor in terms.items()
        }
        for terms in (other.value.top, other.value.bottom)
    )
    return replace(other, value=Quotient(top, bottom), letters=one.letters)


def _counts_pi(value: Value, letter: str) -> bool:
    """Return whether a letter occurs only in a product with π, so that it counts half turns, as in kπ."""
    if not isinstance(value, Quotient) or _uses(value.bottom, letter):
        return False
    with_it = [dict(each[2]) for each in value.top if letter in dict(each[2])]
    return bool(with_it) and all(powers == {letter: 1, "\\pi": 1} for powers in with_it)


def _uses(terms: Polynomial, letter: str) -> bool:
    return any(letter in dict(each[2]) for each in terms)


def _same_values(one: MathAnswer, other: MathAnswer, percent: Percent) -> bool:
    """Return whether two answers that are not equations have the same value in at least one of their possible units."""
    if _is_named(one.value) or _is_named(other.value):
        names = [sorted(each.name.split(",")) for each in (one, other) if "," in each.name]
        if len(names) == 2 and names[0] != names[1]:
            return False
        return any(same_answer(left, right, percent) for left in orders(one) for right in orders(other))
    if one.name and other.name and one.name != other.name:
        # `y = 2x` is the same as `x = y/2`.
        return bool(one.letters and other.letters) and _same_equation(one, other)
    word, plain = (one, other) if isinstance(one.value, WordAnswer) else (other, one)
    if isinstance(word.value, WordAnswer) and plain.plain.isalpha() and len(word.value.text) > 1:
        # `odd` is a word if the other answer is a word.
        return word.value.text == plain.plain.casefold() and one.unit == other.unit
    if one.letters != other.letters and not (_has_words(one.value) or _has_words(other.value)):
        if _is_unit_as_letter(one, other) or _is_unit_as_letter(other, one):
            return True
        measured, other_measured = _with_unit(one, other), _with_unit(other, one)
        if measured.letters != other_measured.letters:
            return False
        one, other = measured, other_measured
    pairs = [
        (scaled, other_scaled)
        for scaled, unit in _measures(one, percent)
        for other_scaled, other_unit in _measures(other, percent)
        if _units_agree(unit, other_unit)
    ]
    if any(_same(left, right) for left, right in pairs):
        return True
    one, other = _with_unit(one, other), _with_unit(other, one)
    factor = times(one.unit, other.unit) if one.unit != other.unit else None
    return factor is not None and _same(_times(one.value, algebra.number(factor)), other.value)


def _with_unit(answer: MathAnswer, other: MathAnswer) -> MathAnswer:
    """Convert the single letter of an answer to a unit, as in `0.05 m`, if the other answer has a unit of the same quantity."""
    if answer.unit or not other.unit or len(answer.letters) != 1 or not isinstance(answer.value, Quotient):
        return answer
    (unit,) = answer.letters
    once = all(letters == ((unit, 1),) for _, _, letters in answer.value.top)
    if times(unit.lower(), other.unit) is None or not once or _uses(answer.value.bottom, unit):
        return answer
    top: dict[algebra.Monomial, Fraction] = {
        (root, imaginary, ()): factor for (root, imaginary, _), factor in answer.value.top.items()
    }
    return replace(
        answer, value=Quotient(top, answer.value.bottom), unit=unit.lower(), letters=frozenset(), plain=""
    )


def _is_unit_as_letter(one: MathAnswer, other: MathAnswer) -> bool:
    r"""Return whether the unit of one answer is a letter in the other answer, as in `5\text{ m}` and `5 m`."""
    if len(one.unit) != 1 or not one.unit.isalpha() or other.unit or one.unit in one.letters:
        return False
    if not (isinstance(one.value, Quotient) and isinstance(other.value, Quotient)):
        return False
    return any(
        other.letters == {*one.letters, unit}
        and other.value.same(algebra.multiply(one.value, algebra.letter(unit)))
        for unit in ({"l", "L"} if one.unit == "l" else {one.unit})
    )


def _measures(answer: MathAnswer, percent: Percent) -> list[tuple[Value, str]]:
    """Return the pairs of value and unit that an answer may represent; for example, 180° may be π, with or without `radians`."""
    value, unit = answer.value, answer.unit
    if unit == "%":
        return [(value if percent == "figure" else _times(value, HUNDREDTH), "%")]
    if unit in {"degree", "degrees"}:
        # `π/4°` is not π/4: if the number contains π, the degree sign cannot be omitted.
        bare = (
            "degree" if all(each.rational is not None for each in _numbers(value)) else "degrees as written"
        )
        return [(value, bare), (_times(value, DEGREE), "radians"), (_times(value, DEGREE), "")]
    return [(value, unit), *([(value, "")] if is_angle(answer) else [])]


def is_angle(answer: MathAnswer) -> bool:
    """Return whether an answer is an angle in radians.

    An answer in radians is rejected if a rational value exceeds one turn, because it is then likely to be in degrees.
    """
    return answer.unit in {"rad", "radian", "radians"} and all(
        each.rational is None or abs(each.rational) <= TURN for each in _numbers(answer.value)
    )


TURN = Fraction(710, 113)
"""The number 2π, rounded up."""


HUNDREDTH = algebra.number(Fraction(1, 100))
DEGREE = algebra.multiply(algebra.number(Fraction(1, 180)), algebra.letter("\\pi"))


def _times(value: Value, factor: Quotient) -> Value:
    """Return a value in which each number is multiplied by a factor."""
    if isinstance(value, Several):
        return Several(value.kind, tuple(_times(item, factor) for item in value.items))
    return algebra.multiply(value, factor) if isinstance(value, Quotient) else value


def _numbers(value: Value) -> list[Quotient]:
    if isinstance(value, Several):
        return [number for item in value.items for number in _numbers(item)]
    return [value] if isinstance(value, Quotient) else []


def is_number(answer: MathAnswer) -> bool:
    """Return whether all values of an answer are rational numbers."""
    numbers = _numbers(answer.value)
    return bool(numbers) and all(number.rational is not None for number in numbers)


def _units_agree(one: str, other: str) -> bool:
    # A plain unit matters only if the other answer has a unit.
    return one == other or (not (one and other) and (one + other == "%" or is_plain_unit(one + other)))


def _has_words(value: Value) -> bool:
    return isinstance(value, WordAnswer) or (isinstance(value, Several) and any(map(_has_words, value.items)))


def _same_equation(one: MathAnswer, other: MathAnswer) -> bool:
    """Return whether two equations are equivalent: the difference of the sides of one is a multiple of that of the other."""
    letters, others = (each.letters | {each.name} if each.name else each.letters for each in (one, other))
    if letters != others or not _units_agree(one.unit, other.unit):
        return False
    if not letters:
        # An equation between numbers is either true or false and carries no other information.
        if (
            not (isinstance(one.value, Equation) and isinstance(other.value, Equation))
            or one.value.left is None
            or other.value.left is None
        ):
            return False
        return one.value.left.same(other.value.left) and one.value.difference.same(other.value.difference)
    differences = []
    for answer in (one, other):
        value = answer.value
        if isinstance(value, Quotient) and answer.name:
            value = Equation(algebra.add(algebra.letter(answer.name), algebra.negate(value)))
        if not isinstance(value, Equation):
            return False
        differences.append(value.difference)
    return differences[0].proportional(differences[1])


def _is_sum(one: MathAnswer, other: MathAnswer) -> bool:
    """Return whether the first answer is an equation that assigns the other answer to a combination of letters.

    Examples are the pair `m + n = 5` and 5, and the pair `xy = 6` and 6.
    """
    if not isinstance(one.value, Equation) or not isinstance(other.value, Quotient) or other.letters:
        return False
    left = one.value.left
    if other.name or len(one.letters) < 2 or left is None or not _units_agree(one.unit, other.unit):
        return False
    sides = left, algebra.add(left, algebra.negate(one.value.difference))
    # One side is a combination of letters, such as `m + n`, `AB + BC`, `abc` or `m/n`, and the other side is its value. `2a = 6`
    # and `r^2 = 9` are unsolved; `x - y = 9` is a line and `x^2 + y^2 = 9` is a circle.
    return any(
        _is_sum_of_letters(side.top)
        and (side.bottom == algebra.ONE or _is_sum_of_letters(side.bottom))
        and value.same(other.value)
        for side, value in (sides, sides[::-1])
    )


def _is_sum_of_letters(terms: Polynomial) -> bool:
    """Return whether all terms are products of the same number of letters, without numeric factors and powers."""
    plain = all(root == 1 and not imaginary and letters for root, imaginary, letters in terms)
    once = all(power == 1 for _, _, letters in terms for _, power in letters)
    return plain and once and len({len(each[2]) for each in terms}) == 1 and set(terms.values()) == {1}


def _same(one: Value, other: Value) -> bool:
    """Return whether two values are the same, ignoring the names and units of the answers."""
    if isinstance(one, Quotient) and isinstance(other, Quotient):
        return one.same(other)
    if isinstance(one, Several) and isinstance(other, Several):
        return _same_several(one, other)
    if isinstance(one, WordAnswer) != isinstance(other, WordAnswer):
        # `\text{C}` and `C` are the same letter.
        words, value = (one, other) if isinstance(one, WordAnswer) else (other, one)
        assert isinstance(words, WordAnswer), "one of the two is a word"
        return len(words.text) == 1 and isinstance(value, Quotient) and value == algebra.letter(words.text)
    return type(one) is type(other) and one == other


def _same_several(one: Several, other: Several) -> bool:
    """Return whether two collections are the same; the order of items is compared only for ordered kinds."""
    kinds = {one.kind, other.kind}
    # Solutions of an equation in several unknowns: repeated solutions count once.
    solutions = kinds == {"list"} and all(
        isinstance(item, Several) and item.kind == "()" and len(item.items) > 1
        for item in (*one.items, *other.items)
    )
    if solutions or kinds == {"set"}:
        pairs = (one.items, other.items), (other.items, one.items)
        return all(any(_same(item, each) for each in others) for items, others in pairs for item in items)
    if len(kinds) == 1 and one.kind in {"list", "union"}:
        return _matched(one.items, other.items)
    if kinds == {"set", "list"}:
        # A list equals a set if it contains each member once.
        once = all(each.kind == "set" or len(_distinct(each)) == len(each.items) for each in (one, other))
        return _matched(one.items, other.items) or (once and _matched(_distinct(one), _distinct(other)))
    if kinds == {"ratio"} and len(one.items) == len(other.items):
        sides = [
            [number for number in items if isinstance(number, Quotient)] for items in (one.items, other.items)
        ]
        first, second = sides[0][0], sides[1][0]
        return all(
            algebra.multiply(left, second).same(algebra.multiply(right, first))
            for left, right in zip(*sides, strict=True)
        ) and bool(first.top) == bool(second.top)
    if kinds == {"vector", "matrix"}:
        vector, matrix = (one, other) if one.kind == "vector" else (other, one)
        rows = [row.items for row in matrix.items if isinstance(row, Several)]
        entries = rows[0] if len(rows) == 1 else tuple(row[0] for row in rows if len(row) == 1)
        return _same_several(vector, Several("vector", entries))
    if (len(kinds) > 1 and kinds not in ({"row", "list"}, {"vector", "()"})) or len(one.items) != len(
        other.items
    ):
        return False
    return all(_same(left, right) for left, right in zip(one.items, other.items, strict=True))


def _is_named(value: Value) -> bool:
    return isinstance(value, Several) and (
        value.kind == "named" or any(_is_named(item) for item in value.items)
    )


def orders(answer: MathAnswer) -> list[MathAnswer]:
    """Return the possible forms of an answer with named values: a point in alphabetical order of the names, and a list.

    An answer without named values is returned unchanged.
    """
    value, names = answer.value, answer.name.split(",")
    if not isinstance(value, Several) or not _is_named(value):
        return [answer]
    if value.kind != "named":
        # Several solutions, each with the same names.
        each = [orders(replace(answer, value=item))[0] for item in value.items]
        return [replace(each[0], value=Several(value.kind, tuple(point.value for point in each)))]
    in_order = sorted(zip(names, value.items, strict=True), key=lambda pair: pair[0])
    point = Several("()", tuple(item for _, item in in_order))
    written = Several("row", value.items)
    return [
        replace(answer, value=point, name=",".join(sorted(names))),
        replace(answer, value=written, name=""),
    ]


def _distinct(several: Several) -> tuple[Value, ...]:
    kept: list[Value] = []
    for value in several.items:
        if not any(_same(value, before) for before in kept):
            kept.append(value)
    return tuple(kept)


def _matched(one: Sequence[Value], other: Sequence[Value]) -> bool:
    # Equality is an equivalence relation here, so any equal partner may be chosen, such as the first one.
    left = list(other)
    for value in one:
        place = next((index for index, partner in enumerate(left) if _same(value, partner)), None)
        if place is None:
            return False
        left.pop(place)
    return not left


# -------- One normal form for all spellings of an answer, so that a vote counts answers rather than spellings
#
# Answers with the same form have the same score for every gold answer without a unit and without a variable: `x = 5`,
# `5\text{ cm}`, `\frac{10}{2}` and `5` have the same form. The forms come from the grader's parser, so that equal scores
# imply equal forms. Quotients of polynomials are an exception, because they are not reduced to lowest terms.


def math_form(text: str, percent: Percent = "figure") -> str:
    """Return the normal form of an answer; a string that is not an answer is returned with normalised spaces."""
    number = parse_number(text)
    if number is not None:
        return str(number.figure if percent == "figure" else number.value)
    try:
        answer = orders(read_answer(text))[0]
        value = answer.value
        if isinstance(value, Quotient) and answer.unit == "%" and percent == "hundredths":
            form = _form(algebra.divide(value, algebra.number(Fraction(100))))
        else:
            form = _form(value)
        form += " to be worked out" * answer.unfinished
    except (Unreadable, Unfamiliar, TooLarge):
        return plain_text(tidy(text) if len(text) <= MAX_CHARACTERS else text)
    bare = answer.unit in {"", "%"} or is_plain_unit(answer.unit) or is_angle(answer)
    unit = "" if bare else f" {answer.unit}"
    if not isinstance(value, Quotient):
        return f"{form}{unit}"
    # Letters that cancel still matter: `5x/x` is not the answer 5.
    shown = {letter for terms in (value.top, value.bottom) for _, _, powers in terms for letter, _ in powers}
    hidden = sorted(answer.letters - shown)
    return f"{form}{unit} with {', '.join(hidden)}" if hidden else f"{form}{unit}"


def _form(value: Value) -> str:
    if isinstance(value, Quotient):
        return _quotient(value)
    if isinstance(value, WordAnswer):
        return value.text
    if isinstance(value, Infinity):
        return "∞" if value.positive else "-∞"
    if isinstance(value, Based):
        return f"{value.digits} in base {value.base}"
    if isinstance(value, Equation):
        # The difference in an equation is 0, so its scale does not matter.
        top, bottom = value.difference.top, value.difference.bottom
        zero = _polynomial(_scaled(top, top[max(top)])) if top else "0"
        over = f" over {_quotient(Quotient(bottom, algebra.ONE))}" if top and bottom != algebra.ONE else ""
        return f"{zero}{over} = 0"
    items = [_form(item) for item in value.items]
    if value.kind == "set" or (value.kind == "list" and len(set(items)) == len(items)):
        return f"{{{'; '.join(sorted(set(items)))}}}"
    if value.kind in {"list", "union"}:
        items.sort()
    return f"{value.kind}<{'; '.join(items)}>"


def _quotient(value: Quotient) -> str:
    whole = value.rational
    if whole is not None:
        return str(whole)
    value = _without_roots_below(value)
    lead = value.bottom[max(value.bottom)]
    top, bottom = _scaled(value.top, lead), _scaled(value.bottom, lead)
    return _polynomial(top) if bottom == algebra.ONE else f"({_polynomial(top)})/({_polynomial(bottom)})"


def _without_roots_below(value: Quotient) -> Quotient:
    """Return a quotient with a rational denominator; for example, `1/√2` becomes `√2/2`.

    A quotient whose denominator contains letters is returned unchanged.
    """
    while not any(letters for _, _, letters in value.bottom):
        below = max(value.bottom, key=lambda term: term[:2])
        if below[:2] == (1, 0):
            break
        # Change the sign of the terms that contain one particular root, or i.
        number = below[0]
        if number > algebra.MAX_RADICAND:
            raise TooLarge
        shared = next(
            (divisor for divisor in range(2, math.isqrt(number) + 1) if number % divisor == 0), number
        )
        other = {
            term: -factor if (term[0] % shared == 0 if shared > 1 else term[1]) else factor
            for term, factor in value.bottom.items()
        }
        value = algebra.multiply(value, Quotient(other, other))
    return value


def _scaled(terms: Polynomial, lead: Fraction) -> dict[Monomial, Fraction]:
    return {monomial: factor / lead for monomial, factor in terms.items()}


def _polynomial(terms: Polynomial) -> str:
    written = []
    for root, imaginary, letters in sorted(terms):
        factor = terms[root, imaginary, letters]
        parts: Sequence[str] = [
            *([str(factor)] if factor != 1 else []),
            *([f"√{root}"] if root > 1 else []),
            *(["i"] if imaginary else []),
            *(name if power == 1 else f"{name}^{power}" for name, power in letters),
        ]
        written.append("*".join(parts) or "1")
    return " + ".join(written) or "0"
