r"""Exact arithmetic for answers: quotients of polynomials in letters, π, i and square roots of integers.

Two quotients are equal exactly if cross-multiplication gives the same polynomial on both sides, because square roots of
distinct squarefree integers are linearly independent over the rationals, and a letter may have any value. Sizes are checked
before each operation, so a value that is too large immediately raises `TooLarge`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

MAX_TERMS = 120
"""Maximum number of terms of a polynomial."""
MAX_BITS = 1024
"""Maximum number of bits of a numerator or denominator."""
MAX_DEGREE = 64
MAX_RADICAND = 10**8
"""Maximum integer under a square root."""

Letters = tuple[tuple[str, int], ...]
"""Letters with their exponents, sorted by name; for example, x²y is (("x", 2), ("y", 1))."""
Monomial = tuple[int, int, Letters]
"""A monomial: a squarefree radicand (1 if there is no root), the power of i (0 or 1), and the letters."""
Polynomial = Mapping[Monomial, Fraction]
"""A polynomial as a mapping from monomials to nonzero coefficients. An empty mapping is the polynomial 0."""


class TooLarge(Exception):
    """Raised for a value above the size limits."""


class Undefined(Exception):
    """Raised for a division by zero or another undefined operation."""


ONE: Polynomial = {(1, 0, ()): Fraction(1)}


@dataclass(frozen=True, slots=True)
class Quotient:
    """The value of the polynomial `top` divided by the polynomial `bottom`, which is not 0."""

    top: Polynomial
    bottom: Polynomial

    def same(self, other: Quotient) -> bool:
        """Return whether two quotients have the same value.

        Raises TooLarge if the comparison is too expensive.
        """
        return _times(self.top, other.bottom) == _times(other.top, self.bottom)

    def proportional(self, other: Quotient) -> bool:
        """Return whether one quotient is a nonzero rational multiple of the other.

        The equations that set two such quotients to 0 are equivalent.
        """
        one, two = _times(self.top, other.bottom), _times(other.top, self.bottom)
        if one.keys() != two.keys():
            return False
        return len({one[monomial] / two[monomial] for monomial in one}) <= 1

    @property
    def rational(self) -> Fraction | None:
        """The value of the quotient as a fraction, or None if the value is not a rational number."""
        top, bottom = _constant(self.top), _constant(self.bottom)
        return None if top is None or bottom is None else top / bottom


def number(value: Fraction) -> Quotient:
    """Return a rational number as a quotient."""
    return Quotient(_bounded({(1, 0, ()): value}), ONE)


def letter(name: str) -> Quotient:
    """Return a letter as a quotient; the letter `i` is the imaginary unit."""
    monomial: Monomial = (1, 1, ()) if name == "i" else (1, 0, ((name, 1),))
    return Quotient({monomial: Fraction(1)}, ONE)


def add(one: Quotient, other: Quotient) -> Quotient:
    """Return the sum of two values."""
    top, more, bottom = one.top, other.top, one.bottom
    if one.bottom != other.bottom:
        top, more = _times(one.top, other.bottom), _times(other.top, one.bottom)
        bottom = _times(one.bottom, other.bottom)
    terms = dict(top)
    for monomial, factor in more.items():
        terms[monomial] = terms.get(monomial, Fraction(0)) + factor
    return Quotient(_bounded(terms), bottom)


def negate(value: Quotient) -> Quotient:
    """Return the value with its sign changed."""
    return Quotient({monomial: -factor for monomial, factor in value.top.items()}, value.bottom)


def multiply(one: Quotient, other: Quotient) -> Quotient:
    """Return the product of two values."""
    return Quotient(_times(one.top, other.top), _times(one.bottom, other.bottom))


def divide(one: Quotient, other: Quotient) -> Quotient:
    """Return the quotient of two values; raise Undefined for a division by zero."""
    if not other.top:
        raise Undefined
    if other.rational is not None:
        return multiply(one, number(1 / other.rational))
    return Quotient(_times(one.top, other.bottom), _times(one.bottom, other.top))


def written_terms(value: Quotient) -> set[object]:
    """Return the terms of a summand.

    If two summands share a term, their sum can be simplified and is therefore unfinished. A bracketed sum with letters has no
    terms, so `3(x + 2)^2 - 2` is finished.
    """
    constant = kind(value)
    if not constant and len(value.top) > 1:
        return set()
    if constant and len(value.bottom) > 1:
        return {(1, 0, ())}
    below = tuple(value.bottom)
    return {(each, below) if below != ((1, 0, ()),) else each for each in value.top or ONE}


def kind(value: Quotient) -> str:
    """Return the kind of a constant: `rational`, `i` (imaginary) or `root`, or an empty string if the value has letters or π.

    A sum that contains roots also has the kind `root`.
    """
    if any(letters for terms in (value.top, value.bottom) for _, _, letters in terms):
        return ""
    if value.rational is not None:
        return "rational"
    return "i" if value.top.keys() == {(1, 1, ())} else "root"


def power(base: Quotient, exponent: int) -> Quotient:
    """Return an integer power of a value.

    Raises Undefined for 0 to the power 0 and for 0 to a negative power.
    """
    if exponent < 0 or (exponent == 0 and not base.top):
        if not base.top:
            raise Undefined
        base, exponent = Quotient(base.bottom, base.top), -exponent
    plain = base.rational
    if plain is not None:
        bits = max(plain.numerator.bit_length(), plain.denominator.bit_length())
        # Powers of ±1 and 0 are small for every exponent.
        if bits > 1 and bits * exponent > MAX_BITS:
            raise TooLarge
        return number(plain ** (exponent if bits > 1 else exponent % 2 or 2 * (exponent > 0)))
    if exponent > MAX_DEGREE:
        raise TooLarge
    result = Quotient(ONE, ONE)
    for _ in range(exponent):
        result = multiply(result, base)
    return result


def square_root(value: Fraction) -> Quotient:
    """Return the square root of a rational number; the root of a negative number is imaginary."""
    # √(p/q) = √(pq)/q
    radicand = abs(value.numerator) * value.denominator
    if radicand > MAX_RADICAND:
        raise TooLarge
    if not radicand:
        return number(Fraction(0))
    # Move each square divisor out of the root, by trial division: √12 = 2√3.
    outside, inside, divisor = 1, radicand, 2
    while divisor * divisor <= inside:
        while inside % (divisor * divisor) == 0:
            outside, inside = outside * divisor, inside // (divisor * divisor)
        divisor += 1
    factor = Fraction(outside, value.denominator)
    return Quotient({(inside, int(value < 0), ()): factor}, ONE)


_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
PRECISION = Context(prec=120)
"""The precision of calculations with decimal numbers (120 digits)."""
_LARGEST = 10**40


def decimal(value: Quotient) -> Decimal | None:
    """Return a value as a decimal number with about 60 correct digits.

    Returns None if the value is imaginary, contains letters or is too large.
    """
    parts = [_decimal(terms) for terms in (value.top, value.bottom)]
    if None in parts or not parts[1]:
        return None
    ratio = PRECISION.divide(parts[0] or Decimal(0), parts[1])
    return ratio if abs(ratio) < _LARGEST else None


def _decimal(terms: Polynomial) -> Decimal | None:
    total = Decimal(0)
    for (root, imaginary, letters), factor in terms.items():
        if imaginary or any(name != "\\pi" for name, _ in letters):
            return None
        part = PRECISION.divide(Decimal(factor.numerator), Decimal(factor.denominator))
        part = PRECISION.multiply(part, PRECISION.sqrt(Decimal(root)))
        for _, exponent in letters:
            part = PRECISION.multiply(part, PRECISION.power(_PI, exponent))
        total = PRECISION.add(total, part)
    return total


def _constant(terms: Polynomial) -> Fraction | None:
    if not terms:
        return Fraction(0)
    return terms.get((1, 0, ())) if len(terms) == 1 else None


def _bounded(terms: dict[Monomial, Fraction]) -> Polynomial:
    kept = {monomial: factor for monomial, factor in terms.items() if factor}
    if len(kept) > MAX_TERMS:
        raise TooLarge
    for (_, _, letters), factor in kept.items():
        if max(factor.numerator.bit_length(), factor.denominator.bit_length()) > MAX_BITS:
            raise TooLarge
        if sum(exponent for _, exponent in letters) > MAX_DEGREE:
            raise TooLarge
    return kept


def _times(one: Polynomial, other: Polynomial) -> Polynomial:
    if len(one) * len(other) > MAX_TERMS * 10:
        raise TooLarge
    terms: dict[Monomial, Fraction] = {}
    for (root, imaginary, letters), factor in one.items():
        for (other_root, other_imaginary, other_letters), other_factor in other.items():
            # √a·√b = g·√(ab/g²), where g is the greatest common divisor; ab/g² is squarefree too.
            common = math.gcd(root, other_root)
            inside = root * other_root // common**2
            sign = -1 if imaginary and other_imaginary else 1
            powers = dict(letters)
            for name, exponent in other_letters:
                powers[name] = powers.get(name, 0) + exponent
            monomial = (inside, imaginary ^ other_imaginary, tuple(sorted(powers.items())))
            product = sign * common * factor * other_factor
            terms[monomial] = terms.get(monomial, Fraction(0)) + product
    return _bounded(terms)
