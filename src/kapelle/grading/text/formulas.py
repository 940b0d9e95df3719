r"""Where formulas and boxes stand in a text, and which of them are one answer: `$1$ and $2$`, `\boxed{1}, \boxed{2}`."""

from __future__ import annotations

import re
from dataclasses import dataclass

FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\]", re.DOTALL
)
r"""A formula, between `$…$`, `$$…$$`, `\(…\)` or `\[…\]`. One that opens twice begins at the last: that takes linear time."""

_SPACE = r"(?:\s|[,;~]|\\[,;: ]|\\q?quad)*"
_WORD = r"(?:(?P<word>and|or)|\\(?:text|mathrm)\{\s*,?\s*(?P<text>and|or)\s*\})?"
_BETWEEN = re.compile(_SPACE + _WORD + _SPACE)
"""What stands between two values of one answer."""
_EDGE = r"(?:\$|\\[()\[\]]|\s|[,;~]|\\[,;: ]|\\q?quad)*"
_BETWEEN_BOXES = re.compile(
    rf"{_EDGE}(?:\\text\{{[^{{}}]{{0,40}}\}}|(?:\s[a-z]{{2,15}}\s+)?(?:and|or))?{_EDGE}(?:[A-Za-z](?:_\{{?[0-9]\}}?)?\s*=\s*)?"
)
"""What stands between two boxes of one answer."""
_UNIT_BEHIND = re.compile(r"\s+([A-Za-z]{1,20}(?: [A-Za-z]{1,20}){0,2})\.?\s*")
_CURRENCY = re.compile(r"(?<![\\$0-9A-Za-z{(=])\$(?=[0-9][0-9,]*(?:\.[0-9]+)?[.,;]?\s+[A-Za-z]{2})")


def joined(text: str) -> str:
    """Return several formulas that are one answer as one, with a unit behind: `$1$ and $2$`, `$5$ cm`; else the text."""
    found = list(FORMULA.finditer(text))
    if not found or found[0].start() > 0 or (len(found) == 1 and found[0].end() == len(text)):
        return text
    together = _together(text, found)
    behind = text[found[-1].end() :].strip(",;")
    unit = _UNIT_BEHIND.fullmatch(behind)
    if together is None or (behind.strip(". ") and unit is None):
        return text
    return together + (f"\\text{{ {unit[1]}}}" if unit else "")


def _together(text: str, found: list[re.Match[str]]) -> str | None:
    """Return formulas as one list, None where more than a comma, `and` or `or` stands between two of them."""
    inner = [next(part for part in match.groups() if part is not None).strip(" .,;") for match in found]
    pieces = [inner[0]]
    for before, after, formula in zip(found[:-1], found[1:], inner[1:], strict=True):
        between = _BETWEEN.fullmatch(text, before.end(), after.start())
        if between is None:
            return None
        word = between["word"] or between["text"]
        pieces += [f" {word} " if word else ", ", formula]
    return "".join(pieces)


def last_formula(text: str) -> tuple[str, int] | None:
    """Return the last formula of a text, with those before it that belong to it, and where it ends; None without one."""
    found = list(FORMULA.finditer(without_currencies(text)))
    if not found:
        return None
    text = without_currencies(text)
    first = len(found) - 1
    while first and _BETWEEN.fullmatch(text, found[first - 1].end(), found[first].start()):
        first -= 1
    together = _together(text, found[first:])
    assert together is not None, "what stands between them was looked at"
    return together, found[-1].end()


def without_currencies(text: str) -> str:
    """Return a text in which the `$` before a price in words is a space: it opens no formula."""
    return _CURRENCY.sub(" ", text)


@dataclass(frozen=True, slots=True)
class Box:
    r"""One `\boxed{…}`."""

    content: str | None
    """None for one that is never closed."""
    start: int
    end: int


def boxes(text: str) -> list[Box]:
    """Return the outermost boxes in order; one that is never closed is the last."""
    found: list[Box] = []
    place = 0
    while (start := text.find("\\boxed{", place)) >= 0:
        depth, place = 1, start + len("\\boxed{")
        opened = place
        while depth and place < len(text):
            # An escaped brace is a character of the answer.
            if text[place] == "\\":
                place += 1
            elif text[place] == "{":
                depth += 1
            elif text[place] == "}":
                depth -= 1
            place += 1
        found.append(Box(text[opened : place - 1].strip() if depth == 0 else None, start, place))
    return found


def last_boxes(text: str, found: list[Box]) -> list[str | None]:
    r"""Return the contents of the last box and of those before it that belong to it: `\boxed{1}` and `\boxed{2}`."""
    first = len(found) - 1
    while first and _BETWEEN_BOXES.fullmatch(text, found[first - 1].end, found[first].start):
        first -= 1
    return list(dict.fromkeys(box.content for box in found[first:]))
