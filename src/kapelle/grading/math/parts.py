r"""The parts of one written value: a name before `=`, a unit behind, or words alone.

Works on characters only and in linear time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kapelle.grading.math.expression import Refused, Unfamiliar
from kapelle.grading.math.text import opened, with_commas

_LHS = re.compile(
    r"([A-Z]{2}|[A-Za-z]|\\[A-Za-z]+)((?:_\{?[A-Za-z0-9]+\}?)?)(?:\([a-z](?:,\s*[a-z])*\))?"
    r"\s*(?:=|\\in(?![A-Za-z]))(?!=)\s*"
)
_TEXT = r"\\(?:text|mathrm|textnormal|textrm|textbf|textit|mbox|mathbf|operatorname)"
_ONLY_TEXT = re.compile(_TEXT + r"\{([^{}\\$]*)\}")
_FIGURES = re.compile(r"\s*[-+]?[0-9][0-9,.]*\s*")
_UNIT = re.compile(rf"\s*{_TEXT}\{{\s*([^{{}}\\$]+?)\.?\s*\}}(?:\^\{{?([23])\}}?)?$")
_PLAIN_UNIT = re.compile(
    r"(?<=[0-9)}])\s+([A-Za-z]{2,}(?: [A-Za-z]{2,})?)(?:\^\{?([23])\}?)?$|(?<=[0-9])\s*(cm|mm|km|kg)(?:\^\{?([23])\}?)?$"
)
_DEGREE = re.compile(r"\s*\^\s*\{?\s*\\(?:circ|degree)\s*\}?$")
FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)\b")
"""A function of an angle."""
_PERCENT = re.compile(r"\s*(?:\\?%|(?<=[0-9)}\s])(?:\\text\{\s*)?(?:pct|percent(?:age)?)(?:\s*\})?)$")
_CURRENCY = re.compile(r"([-+]?)\s*(\\\$|\$|€|£|\\pounds\b|\\euro\b)\s*(?=[-+]?[0-9.\\])")
_CURRENCY_NAMES = {"dollar": "$", "dollars": "$", "euro": "€", "euros": "€"}
_WORD = re.compile(r"[A-Za-z][A-Za-z' .-]*[A-Za-z.]|[A-Za-z]|[A-Za-z]{3,}\.? [0-9]{1,4}(?:st|nd|rd|th)?")
_BETWEEN_WORDS = re.compile(r"\s*(?:,(?![0-9])|;|(?<![A-Za-z])(?:and|or)(?![A-Za-z]))\s*")


# A factor (`million`, `dozen`, `cents`) is not among them.
_UNITS = (
    "$ € £ degree degrees radians mm cm m km inch inches in ft foot feet yd yard yards mile miles mph kg g gram grams"
    " pound pounds lb s second seconds min minute minutes h hour hours day days week weeks month months year"
    " years dollar dollars unit units meter meters metre metres centimeter centimeters kilometers people"
    " students ways cm^2 cm^3 m^2 m^3 ft^2 ft^3 in^2 in^3 units^2 inches^2 feet^2 meters^2"
)
PLAIN_UNITS = frozenset(_UNITS.split()) | {
    f"{size} {unit}"
    for size in ("square", "cubic")
    for unit in ("units", "inches", "feet", "meters", "cm", "miles", "yards", "centimeters")
}
"""Units that change nothing where the other answer names none."""


@dataclass(frozen=True, slots=True)
class Part:
    """One value as it is written."""

    body: str
    name: str
    """The name before the equals sign: `x` for `x = 5`, and for `x_1 = 5` `x_1`."""
    unit: str
    """In lower case."""


def words_of(body: str) -> list[str]:
    r"""Return the words that an answer consists of, `\text{…}` or plain, split at commas; empty for mathematics."""
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
    """Return whether letters are a word rather than a product such as `xy`."""
    return " " in piece or len(piece) > 3 or piece.lower() in {"yes", "no", "nan", "inf", "oo", "zoo"}


def _plain_words(text: str) -> str:
    words = " ".join(text.split()).strip("().,;: ")
    return words if len(words) == 1 else words.casefold()


def mathematics(body: str) -> str:
    r"""Return the text of an answer that is not words: `5` for `\text{5}`. Raises Unfamiliar for strange characters."""
    only = _ONLY_TEXT.fullmatch(body)
    if only is not None:
        body = only[1].strip()
    if not body.replace("€", "").replace("£", "").isascii():
        raise Unfamiliar
    return body


def take_apart(text: str) -> Part | None:
    """Return the parts of an answer that is one value; None for words and for several values.

    Raises Refused where it is empty or too long, Unfamiliar where it is unreadable.
    """
    body = opened(text)
    if words_of(body):
        return None
    body = with_commas(mathematics(body))
    return None if ", " in body else part_of(body)


def part_of(text: str) -> Part:
    """Return the parts of one value."""
    name, body = without_name(text.strip())
    body, unit = without_unit(body)
    if not body:
        raise Refused("It is a name or a unit without a value.")
    return Part(body, name, unit)


def without_name(text: str) -> tuple[str, str]:
    """Return the name before the first `=` and what stands behind it; no name where none stands there."""
    found = _LHS.match(text)
    if found is None:
        return "", text
    rest = text[found.end() :]
    # `x = y = 5`: which of both is it?
    return ("", text) if _LHS.match(rest) else (found[1] + found[2].replace("{", "").replace("}", ""), rest)


def without_unit(body: str) -> tuple[str, str]:
    r"""Return a value and its unit. Raises Unfamiliar for degrees inside a function: `\cos 20^\circ` has no unit."""
    currency = _CURRENCY.match(body)
    if currency is not None:
        rest = currency[1] + body[currency.end() :]
        return rest, {"\\$": "$", "\\pounds": "£", "\\euro": "€"}.get(currency[2], currency[2])
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
    unit = " ".join(groups[0].casefold().split())
    unit = _CURRENCY_NAMES.get(unit, unit)
    return body[: found.start()].strip(), f"{unit}^{groups[1]}" if len(groups) > 1 else unit
