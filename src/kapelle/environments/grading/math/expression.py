r"""Parse a mathematical expression in LaTeX or plain notation into exact algebra; no code is evaluated.

    sum     := ['+' | '-'] product (('+' | '-' | '\pm') product)*
    product := factor (['*' | '/'] factor)*
    factor  := base ['^' exponent] ['!']
    base    := number | letter ['_' index] | '(' sum ')' | '{' sum '}' | \frac a b | \sqrt a | \pi | …

An expression with two possible meanings (`1/2x`, `\frac123`, `2 3`) raises Unreadable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from kapelle.environments.grading.math import algebra
from kapelle.environments.grading.math.algebra import Quotient, TooLarge, Undefined

MAX_TOKENS = 300
MAX_DEPTH = 24
MAX_FACTORIAL = 20
MAX_BINOMIAL = 200


class Unreadable(Exception):
    """Raised for a string that is ambiguous, too large or undefined; no grader may accept such a string as an answer."""


class NotAnAnswer(Unreadable):
    """Raised for a string that has no value, even as a gold answer, because it is empty or contradicts itself."""


class Unfamiliar(Exception):
    """Raised for a string that the exact parser cannot read but that math-verify may be able to read."""


_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau"
    " upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega"
)
GREEK = frozenset(_GREEK.split())
_NOT_A_PRODUCT = frozenset(
    {"oo", "nan", "inf", "zoo", "or", "if", "no", "is", "sin", "cos", "tan", "log", "ln", "exp"}
)
_TOKEN = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<command>\\(?:[A-Za-z]+|[^A-Za-z]))|(?P<run>[A-Za-z]+)"
    r"|(?P<sign>\*\*|[-+*/^_(){}\[\]!|])|(?P<space>\s+)|(?P<other>.)",
    re.DOTALL,
)
_SAME = {
    "**": "^",
    "\\cdot": "*",
    "\\times": "*",
    "\\div": "/",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
}
_STARTS = frozenset({"(", "{", "\\frac", "\\binom", "\\sqrt", "\\pi"})


def tokens(text: str) -> list[str]:
    """Return the tokens of an expression.

    Raises Unreadable if there are too many tokens and Unfamiliar if a token is unknown.
    """
    found: list[str] = []
    for match in _TOKEN.finditer(text):
        token = match[0]
        if match["space"]:
            continue
        if match["other"]:
            raise Unfamiliar
        if match["run"]:
            if token in {"pi", "sqrt"}:
                found.append(f"\\{token}")
            elif len(token) > 3 or token.lower() in _NOT_A_PRODUCT:
                raise Unfamiliar
            else:
                # Two or three adjacent letters are a product; more letters are a word.
                found.extend(token)
        else:
            found.append(_SAME.get(token, token))
        if len(found) > MAX_TOKENS:
            raise Unreadable(f"It has more than {MAX_TOKENS} parts.")
    return found


@dataclass(slots=True)
class Seen:
    """The notation that the parser has found in expressions."""

    letters: set[str] = field(default_factory=set)
    unfinished: bool = False
    """Whether part of an expression still has to be calculated, as in `3 + 4`, `2^{10}`, `5!`, `168/2` and `2x + 3x`."""


def read_expression(text: str, seen: Seen) -> list[Quotient]:
    r"""Return the values of an expression: one value, or two values if the expression contains one `\pm`.

    The notation of the expression is recorded in `seen`. Raises Unreadable if the expression is ambiguous, too large or
    undefined, and Unfamiliar if it cannot be parsed.
    """
    parts = tokens(text)
    if parts.count("\\pm") > 1:
        raise Unreadable("It contains more than one ±.")
    signs = ("+", "-") if "\\pm" in parts else ("+",)
    try:
        return [_Reader([sign if part == "\\pm" else part for part in parts], seen).whole() for sign in signs]
    except TooLarge:
        raise Unreadable("It is too large.") from None
    except Undefined:
        raise Unreadable("It divides by zero.") from None


class _Reader:
    """A recursive descent parser for a sequence of tokens, with a limit on the depth of nesting."""

    def __init__(self, parts: Sequence[str], seen: Seen) -> None:
        self._parts = parts
        self._seen = seen
        self._place = 0
        self._depth = 0

    def whole(self) -> Quotient:
        value = self._sum()
        if self._place < len(self._parts):
            raise Unfamiliar
        return value

    def _next(self) -> str:
        return self._parts[self._place] if self._place < len(self._parts) else ""

    def _take(self) -> str:
        part = self._next()
        self._place += 1
        return part

    def _expect(self, part: str) -> None:
        found = self._take()
        if found != part:
            raise Unreadable(f"'{part}' is missing.") if found in _INCOMPLETE else Unfamiliar

    def _sum(self) -> Quotient:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable(f"It is nested more than {MAX_DEPTH} levels deep.")
        negative = self._next() == "-"
        if self._next() in {"+", "-"}:
            self._take()
        doubled = negative and self._next() == "("
        value = self._product()
        if negative:
            self._seen.unfinished |= doubled and (value.rational or 0) < 0
            value = algebra.negate(value)
        written = algebra.written_terms(value)
        while self._next() in {"+", "-"}:
            negative = self._take() == "-"
            if self._next() == "-":
                self._take()
                negative = not negative
            term = self._product()
            self._seen.unfinished |= not written.isdisjoint(more := algebra.written_terms(term))
            written |= more
            value = algebra.add(value, algebra.negate(term) if negative else term)
        self._depth -= 1
        return value

    def _product(self) -> Quotient:
        mixed = self._mixed()
        value = self._factor() if mixed is None else mixed
        kinds = {algebra.kind(value)} - {""}
        divided = False
        while True:
            part = self._next()
            if part in {"*", "/"}:
                self._take()
                divided = part == "/"
            elif part in _STARTS or part.isalpha() or part[1:] in GREEK:
                if divided or mixed is not None:
                    raise Unreadable("It is ambiguous.")
            elif part[:1].isdigit() or part[:1] == ".":
                before = self._parts[self._place - 1]
                if before == ")":
                    raise Unfamiliar
                if before != "!" or divided or mixed is not None:
                    raise Unreadable("Two numbers are next to each other.")
            else:
                return value
            # `6.02 * 10^{23}` is a number.
            scientific = "rational" in kinds and self._parts[self._place : self._place + 2] == ["10", "^"]
            factor = self._factor()
            if part == "/":
                value = self._ratio(value, factor)
                continue
            kind = algebra.kind(factor)
            self._seen.unfinished |= kind in kinds and not scientific
            kinds |= {kind} - {""}
            value = algebra.multiply(value, factor)

    def _ratio(self, top: Quotient, bottom: Quotient) -> Quotient:
        """Return a quotient and record whether it is unfinished.

        A fraction such as `1/2` is finished, but a quotient such as `6/2` still has to be calculated.
        """
        value = algebra.divide(top, bottom)
        above, below = top.rational, bottom.rational
        if above is not None and below is not None and below != 1:
            whole = above.denominator == below.denominator == 1
            self._seen.unfinished |= not whole or above % below == 0
        self._seen.unfinished |= any(imaginary for _, imaginary, _ in bottom.top)
        return value

    def _mixed(self) -> Quotient | None:
        r"""Return a mixed number such as `2\frac{1}{3}`, or None if the next tokens do not have this form.

        Raises Unreadable for an expression that may be a mixed number or a product.
        """
        if not (self._next().isdigit() and self._parts[self._place + 1 : self._place + 2] == ["\\frac"]):
            return None
        place = self._place
        whole = self._number(self._take())
        part = self._factor()
        if part.rational is None:
            self._place = place  # `2\frac{\pi}{3}` is a product
            return None
        if not 0 < part.rational < 1:
            raise Unreadable("It could be a mixed number or a product.")
        return algebra.add(whole, part)

    def _factor(self) -> Quotient:
        start = self._place
        value = self._base()
        if self._next() == "!":
            self._take()
            plain = value.rational
            if plain is None or plain.denominator != 1 or plain < 0:
                raise Unfamiliar
            if plain > MAX_FACTORIAL:
                raise TooLarge
            value = algebra.number(Fraction(math.factorial(plain.numerator)))
            self._seen.unfinished |= True
            if self._next() == "!":
                raise Unreadable("It could be a double factorial or the factorial of a factorial.")
        if self._next() == "^":
            self._take()
            # A minus sign belongs to the exponent: `2^-3`.
            negative = self._next() == "-"
            if negative:
                self._take()
            exponent = self._base()
            ten = self._parts[start : start + 2] == ["10", "^"]
            constant = algebra.kind(value)
            value = _raised(value, algebra.negate(exponent) if negative else exponent, self._seen.letters)
            half = exponent.rational == Fraction(1, 2) and value.rational is None
            self._seen.unfinished |= bool(constant and algebra.kind(value)) and not ten and not half
            if self._next() == "^":
                raise Unreadable("It raises a power to a power without brackets.")
        return value

    def _enclosed(self, opening: str, closing: str) -> Quotient:
        self._expect(opening)
        value = self._sum()
        self._expect(closing)
        return value

    def _base(self) -> Quotient:
        part = self._next()
        if part in {"(", "{"}:
            return self._enclosed(part, ")" if part == "(" else "}")
        self._take()
        if part[:1].isdigit() or part[:1] == ".":
            return self._number(part)
        if part.isalpha() or part[1:] in GREEK:
            return self._letter(part)
        if part == "\\pi":
            return algebra.letter(part)
        if part == "\\frac":
            top = self._argument()
            return self._ratio(top, self._argument())
        if part == "\\binom":
            above, below = (self._argument().rational for _ in range(2))
            if (
                above is None
                or below is None
                or above.denominator != 1
                or below.denominator != 1
                or below < 0
            ):
                raise Unfamiliar
            if not 0 <= above <= MAX_BINOMIAL:
                raise TooLarge
            self._seen.unfinished |= True
            return algebra.number(Fraction(math.comb(above.numerator, below.numerator)))
        if part == "\\sqrt":
            if self._next() == "[":
                raise Unfamiliar
            radicand = (self._base() if self._next() == "(" else self._argument()).rational
            if radicand is None:
                raise Unfamiliar
            try:
                root = algebra.square_root(radicand)
            except TooLarge:
                raise Unfamiliar from None
            self._seen.unfinished |= algebra.kind(root) != "root"
            return root
        raise Unreadable("It is incomplete.") if part in _INCOMPLETE else Unfamiliar

    def _argument(self) -> Quotient:
        part = self._next()
        if part == "{":
            return self._enclosed("{", "}")
        if part.isdigit() and len(part) == 2 and self._parts[self._place - 1] in {"\\frac", "\\binom"}:
            # `\frac12` takes one digit for each argument, so the second digit is the next argument.
            self._parts = [*self._parts[: self._place], part[0], part[1], *self._parts[self._place + 1 :]]
            part = part[0]
        if (part.isdigit() and len(part) == 1) or (part.isalpha() and len(part) == 1) or part == "\\pi":
            return self._base()
        raise Unreadable("It contains an ambiguous fraction or root.")

    def _number(self, part: str) -> Quotient:
        if len(part) > algebra.MAX_BITS // 4:
            raise TooLarge
        if self._next() == "_":
            raise Unfamiliar
        return algebra.number(Fraction(part))

    def _letter(self, part: str) -> Quotient:
        if self._next() == "_":
            self._take()
            index = self._take()
            if index == "{":
                index = self._take()
                self._expect("}")
            if not index.isalnum():
                raise Unfamiliar
            part = f"{part}_{index}"
        elif self._next() == "(" and part in {"f", "g", "h"}:
            # This is the value of a function, not a product.
            raise Unfamiliar
        if part != "i":
            # The imaginary unit is a number: √-4 is 2i.
            self._seen.letters.add(part)
        return algebra.letter(part)


_INCOMPLETE = frozenset({"", ")", "}", "]", "*", "/", "^", "_", "+", "-"})


MAX_EXPONENT = 10**5
"""Maximum exponent of a power that is too large to calculate. Such a power is treated like a letter and equals only itself."""


def _raised(value: Quotient, exponent: Quotient, letters: set[str]) -> Quotient:
    plain, base = exponent.rational, value.rational
    if plain is None:
        if any("^" in name for each in exponent.top for name, _ in each[2]):
            raise TooLarge
        raise Unfamiliar
    if plain.denominator == 1:
        whole = base is not None and base.denominator == 1 and base > 1
        if whole and base is not None and 0 < plain <= MAX_EXPONENT:
            # Find the smallest base: 9 is 3 to the power 2.
            root, times = base.numerator, 1
            for each in range(root.bit_length() - 1, 1, -1) if root.bit_length() < 50 else ():
                least = round(root ** (1.0 / each))
                if least > 1 and least**each == root:
                    root, times = least, each
                    break
            if root.bit_length() * times * plain > algebra.MAX_BITS:
                # 3^2023 is not calculated; like a letter, it equals only itself.
                name = f"{root}^{times * plain.numerator}"
                letters.add(name)
                return algebra.letter(name)
        if abs(plain) > algebra.MAX_BITS and base not in {Fraction(-1), Fraction(0), Fraction(1)}:
            raise TooLarge
        return algebra.power(value, plain.numerator)
    if base is None or base < 0 or plain != Fraction(1, 2):
        raise Unfamiliar
    return algebra.square_root(base)
