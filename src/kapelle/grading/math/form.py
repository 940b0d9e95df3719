r"""One text for all ways to write an answer, so that a vote counts answers and not spellings.

Answers of one form are worth the same for every gold answer that names no unit and no variable: `x = 5`,
`5\text{ cm}`, `\frac{10}{2}` and `5` are one. Forms are made by the reader that grades, so that what is graded alike
is counted alike; quotients of polynomials are the exception, which are not reduced to lowest terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from kapelle.grading.math import algebra
from kapelle.grading.math.algebra import Monomial, Polynomial, Quotient, TooLarge
from kapelle.grading.math.answers import read_answer
from kapelle.grading.math.expression import Refused, Unfamiliar
from kapelle.grading.math.numeric import parse_number
from kapelle.grading.math.parts import PLAIN_UNITS
from kapelle.grading.math.sameness import Percent, is_angle, orders
from kapelle.grading.math.text import MAX_CHARACTERS, tidy
from kapelle.grading.math.values import Answer, Based, Equation, Infinity, Several, Value, Words
from kapelle.grading.text.exact import plain_text


def math_form(text: str, percent: Percent = "figure") -> str:
    """Return an answer's normal form; what is not read as mathematics stands as it is written, space aside."""
    number = parse_number(text)
    if number is not None:
        return str(number.figure if percent == "figure" else number.value)
    try:
        answer = orders(read_answer(text))[0]
        form = _form(_measured(answer, percent))
    except (Refused, Unfamiliar, TooLarge):
        return plain_text(tidy(text) if len(text) <= MAX_CHARACTERS else text)
    unit = "" if answer.unit in PLAIN_UNITS | {"", "%", "degree"} or is_angle(answer) else f" {answer.unit}"
    return f"{form}{unit}{_cancelled(answer)}"


def _measured(answer: Answer, percent: Percent) -> Value:
    if isinstance(answer.value, Quotient) and answer.unit == "%" and percent == "hundredths":
        return algebra.divide(answer.value, algebra.number(Fraction(100)))
    return answer.value


def _cancelled(answer: Answer) -> str:
    """Return the letters that the value no longer shows: `5x/x` is not the answer 5."""
    if not isinstance(answer.value, Quotient):
        return ""
    polynomials = (answer.value.top, answer.value.bottom)
    shown = {letter for terms in polynomials for _, _, powers in terms for letter, _ in powers}
    hidden = sorted(answer.letters - shown)
    return f" with {', '.join(hidden)}" if hidden else ""


def _form(value: Value) -> str:
    if isinstance(value, Quotient):
        return _quotient(value)
    if isinstance(value, Words):
        return value.text
    if isinstance(value, Infinity):
        return "∞" if value.positive else "-∞"
    if isinstance(value, Based):
        return f"{value.digits} in base {value.base}"
    if isinstance(value, Equation):
        return f"{_zero(value.difference)} = 0"
    return _several(value)


def _several(several: Several) -> str:
    items = [_form(item) for item in several.items]
    if several.kind in {"set", "list"} and (several.kind == "set" or len(set(items)) == len(items)):
        return f"{{{'; '.join(sorted(set(items)))}}}"
    if several.kind in {"list", "union"}:
        items.sort()
    return f"{several.kind}<{'; '.join(items)}>"


def _quotient(value: Quotient) -> str:
    whole = value.rational
    if whole is not None:
        return str(whole)
    value = _without_roots_below(value)
    lead = value.bottom[max(value.bottom)]
    top, bottom = _scaled(value.top, lead), _scaled(value.bottom, lead)
    return _polynomial(top) if bottom == algebra.ONE else f"({_polynomial(top)})/({_polynomial(bottom)})"


def _without_roots_below(value: Quotient) -> Quotient:
    """Return a quotient with a rational number below: `1/√2` is `√2/2`; one with letters below stays."""
    while not any(letters for _, _, letters in value.bottom):
        below = max(value.bottom, key=lambda term: term[:2])
        if below[:2] == (1, 0):
            break
        # What is under a root together, or i, changes its sign.
        shared = _least_factor(below[0])
        other = {
            term: -factor if (term[0] % shared == 0 if shared > 1 else term[1]) else factor
            for term, factor in value.bottom.items()
        }
        value = algebra.multiply(value, Quotient(other, other))
    return value


def _least_factor(number: int) -> int:
    if number > algebra.MAX_RADICAND:
        raise TooLarge
    return next((divisor for divisor in range(2, math.isqrt(number) + 1) if number % divisor == 0), number)


def _zero(difference: Quotient) -> str:
    """Return what is 0 in an equation, whose scale means nothing."""
    if not difference.top:
        return "0"
    top = _polynomial(_scaled(difference.top, difference.top[max(difference.top)]))
    return (
        top
        if difference.bottom == algebra.ONE
        else f"{top} over {_quotient(Quotient(difference.bottom, algebra.ONE))}"
    )


def _scaled(terms: Polynomial, lead: Fraction) -> dict[Monomial, Fraction]:
    return {monomial: factor / lead for monomial, factor in terms.items()}


def _polynomial(terms: Polynomial) -> str:
    return " + ".join(_term(monomial, terms[monomial]) for monomial in sorted(terms)) or "0"


def _term(monomial: Monomial, factor: Fraction) -> str:
    root, imaginary, letters = monomial
    parts: Sequence[str] = [
        *([str(factor)] if factor != 1 else []),
        *([f"√{root}"] if root > 1 else []),
        *(["i"] if imaginary else []),
        *(name if power == 1 else f"{name}^{power}" for name, power in letters),
    ]
    return "*".join(parts) or "1"
