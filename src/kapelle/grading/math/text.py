r"""The outside of a mathematical answer: delimiters, spacing, a name before `=`, a unit behind.

Works on characters only and in linear time; the longest text that is looked at has `MAX_CHARACTERS`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kapelle.grading.math.expression import Refused, Unfamiliar

MAX_CHARACTERS = 400

_SPACING = re.compile(
    r"(?<!\\)\\(?:[,;:! ]|quad\b|qquad\b|displaystyle\b|left\b|right\b|limits\b)|(?<=\S)~(?=\S)"
)
_ARRAY = re.compile(
    r"[\[(]\s*\\begin\{array\}\{[clr]{1,32}\}((?:(?!\\begin).)*)\\end\{array\}\s*[\])]", re.DOTALL
)
_NAMED = {
    "°": r"^\circ",
    "×": "*",
    "·": "*",
    "÷": "/",
    "π": r"\pi ",
    "√": r"\sqrt",
    "∞": r"\infty ",
    "±": r"\pm ",
    "∪": r"\cup ",
}
_NAMED_PATTERN = re.compile("|".join(_NAMED))
_AND = re.compile(r",?\s*(?:\\(?:text|mathrm|textrm)\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*")
_LHS = re.compile(
    r"([A-Za-z]|\\[A-Za-z]+)((?:_\{?[A-Za-z0-9]+\}?)?)(?:\([a-z](?:,\s*[a-z])*\))?\s*(?:=|\\in\b)(?!=)\s*"
)
_TEXT = r"\\(?:text|mathrm|textnormal|textrm|textbf|textit|mbox|mathbf|operatorname)"
_ONLY_TEXT = re.compile(_TEXT + r"\{([^{}\\$]*)\}")
_FIGURES = re.compile(r"\s*[-+]?[0-9][0-9,.]*\s*")
_UNIT = re.compile(rf"\s*{_TEXT}\{{\s*([^{{}}\\$]+?)\.?\s*\}}(?:\^\{{?([23])\}}?)?$")
_PLAIN_UNIT = re.compile(
    r"(?<=[0-9)}])\s+([A-Za-z]{2,}(?: [A-Za-z]{2,})?)(?:\^\{?([23])\}?)?$|(?<=[0-9])\s*(cm|mm|km|kg)(?:\^\{?([23])\}?)?$"
)
_DEGREE = re.compile(r"\s*\^\s*\{?\s*\\(?:circ|degree)\s*\}?$")
_PERCENT = re.compile(r"\s*(?:\\?%|(?<=[0-9)}\s])(?:\\text\{\s*)?(?:pct|percent(?:age)?)(?:\s*\})?)$")
_CURRENCY = re.compile(r"([-+]?)\s*(\\\$|\$|€|£|\\pounds\b|\\euro\b)\s*(?=[-+]?[0-9.\\])")
_CURRENCY_NAMES = {"dollar": "$", "dollars": "$", "euro": "€", "euros": "€"}
_WORDS = re.compile(r"[A-Za-z][A-Za-z' .-]*[A-Za-z.]")


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
class Written:
    """An answer without its wrapping."""

    body: str
    words: bool
    """Whether the body is words rather than mathematics."""
    name: str
    unit: str


def take_apart(text: str) -> Written:
    """Return the parts of an answer; Refused when it is empty or too long, Unfamiliar when unreadable."""
    if len(text) > MAX_CHARACTERS:
        raise Refused(f"It has {len(text):,} characters; at most {MAX_CHARACTERS} are read.")
    body = tidy(text)
    if not body:
        raise Refused("It is empty.")
    only = _ONLY_TEXT.fullmatch(body)
    if only is not None and _FIGURES.fullmatch(only[1]):
        body, only = only[1].strip(), None
    if only is not None or (_WORDS.fullmatch(body) and _wordy(body)):
        return Written(_plain_words(only[1] if only else body), True, "", "")
    if not body.replace("€", "").replace("£", "").isascii():
        raise Unfamiliar
    name, body = _without_name(_AND.sub(", ", body))
    body, unit = _without_unit(body)
    if not body:
        raise Refused("It is a name or a unit without a value.")
    return Written(body, False, name, unit)


def tidy(text: str) -> str:
    """Return an answer without delimiters, marks around it, spacing commands and a full stop at its end."""
    body = _unmarked(text)
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        size = len(opening) + len(closing)
        if len(body) > size and body.startswith(opening) and body.endswith(closing):
            inner = body[len(opening) : -len(closing)]
            # `$5 or $6` is not one pair of delimiters around an answer.
            if opening not in inner and not inner.endswith("\\"):
                body = inner.strip().removesuffix(".")
                break
    # `11,\! 111`: the thin space pulls the digits of one number together.
    body = re.sub(r",\s*\\!\s*", ",", body)
    body = _SPACING.sub(lambda match: " " if match[0] in {"\\ ", "~"} else "", body)
    body = _ARRAY.sub(lambda match: rf"\begin{{pmatrix}}{match[1]}\end{{pmatrix}}", body)
    body = _NAMED_PATTERN.sub(lambda match: _NAMED[match[0]], body)
    return body.replace("{,}", ",").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}").strip()


_MARKED = re.compile(
    r"\*\*(?P<bold>[^*]+)\*\*|`(?P<code>[^`]+)`|\\boxed\s*\{(?P<box>(?:[^{}]|\{[^{}]*\})+)\}|(?:\\therefore\b|=(?!=))(?P<rest>.+)"
)


def _unmarked(text: str) -> str:
    """Return an answer without what a writer puts around the whole of it: bold, a box, `=` before, `,` behind."""
    body = re.sub(r"[.,;]$", "", text.strip()).strip()
    found = _MARKED.fullmatch(body)
    inner = next((part for part in found.groups() if part), "") if found else ""
    return inner.strip() if inner and "boxed" not in inner else body


def split_top(text: str, mark: str) -> list[str]:
    """Return the parts between the marks that stand outside all brackets.

    A bracket closes whatever is open, as `[0, 1)` does. Refused when they do not balance.
    """
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        character = text[place]
        if depth == 0 and text.startswith(mark, place):
            parts.append(text[start:place])
            place += len(mark)
            start = place
            continue
        if text.startswith("\\begin{", place):
            depth += 1
        elif text.startswith("\\end{", place):
            depth -= 1
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if depth < 0:
            raise Refused("Its brackets do not match.")
        place += 1
    if depth:
        raise Refused("Its brackets do not match.")
    return [*parts, text[start:]]


def _wordy(body: str) -> bool:
    """Return whether letters are a word rather than a product such as `xy`."""
    return " " in body or len(body) > 3 or body.lower() in {"yes", "no", "nan", "inf", "oo", "zoo"}


def _plain_words(text: str) -> str:
    words = " ".join(text.split()).strip("().,;: ")
    return words if len(words) == 1 else words.casefold()


def _without_name(body: str) -> tuple[str, str]:
    found = _LHS.match(body)
    if found is None:
        return "", body
    name = found[1] + found[2].replace("{", "").replace("}", "")
    rest = body[found.end() :]
    # `x = 1, x = 2` names the same letter twice; two letters are a system, which is not read here.
    parts = [part.strip() for part in split_top(rest, ",")]
    bare = []
    for part in parts:
        again = _LHS.match(part)
        if again is None:
            bare.append(part)
        elif again[0].split("=")[0].strip() == found[0].split("=")[0].strip():
            bare.append(part[again.end() :])
        elif len(parts) > 1:
            raise Unfamiliar
        else:
            # `x = y = 5`: an equation with two signs, refused by the reader.
            return "", body
    value = ", ".join(bare) if bare != parts else rest
    # `x = 5 = 6` has no name: it is read as the chain that it is, and refused.
    return ("", body) if "=" in value else (name, value)


def _without_unit(body: str) -> tuple[str, str]:
    currency = _CURRENCY.match(body)
    if currency is not None:
        rest = currency[1] + body[currency.end() :]
        return rest, {"\\$": "$", "\\pounds": "£", "\\euro": "€"}.get(currency[2], currency[2])
    for pattern, unit in ((_PERCENT, "%"), (_DEGREE, "degree")):
        found = pattern.search(body)
        if found is not None:
            return body[: found.start()].strip(), unit
    found = _UNIT.search(body) or _PLAIN_UNIT.search(body)
    if found is None:
        return body, ""
    groups = [group for group in found.groups() if group]
    unit = " ".join(groups[0].casefold().split())
    unit = _CURRENCY_NAMES.get(unit, unit)
    return body[: found.start()].strip(), f"{unit}^{groups[1]}" if len(groups) > 1 else unit
