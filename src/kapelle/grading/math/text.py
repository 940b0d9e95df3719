r"""The characters of a mathematical answer: delimiters, spacing, brackets, and formulas that stand in words.

Works in linear time; the longest text that is looked at has `MAX_CHARACTERS`.
"""

from __future__ import annotations

import re

from kapelle.grading.math.expression import Nothing, Refused
from kapelle.grading.math.notation import plain_notation
from kapelle.grading.math.spelling import unadorned, without_frame
from kapelle.grading.text.formulas import boxes, joined

MAX_CHARACTERS = 400
MAX_WRAPPINGS = 4
"""Marks around marks that are taken off, bold around a box."""

_SPACING = re.compile(r"(?<!\\)\\(?:[,;:! ]|q?quad|displaystyle\b|left\b|right\b|limits\b)|(?<=\S)~(?=\S)")
_ARRAY = re.compile(
    r"[\[(]\s*\\begin\{array\}\{[clr| ]{1,64}\}((?:(?!\\begin).)*)\\end\{array\}\s*[\])]", re.DOTALL
)
_ONE_LETTER = re.compile(r"(?:(?<=\S)|(?<=[-+*/] ))\\(?:mathrm|mathbf|mathit|operatorname)\{([A-Za-z])\}")
_UPRIGHT = re.compile(r"(?<=[0-9)}])\\(?:mathrm|operatorname)\{([smghlLNJWV])\}$")
"""A unit of one letter, which stands upright; a variable does not."""
_WORD_BETWEEN = r"(?:\\(?:text|mathrm|textrm)\{\s*,?\s*(?:%s)\s*\}|(?<![A-Za-z\\])(?:%s)(?![a-z]))"
_AND = re.compile(r"[,;]?\s*" + _WORD_BETWEEN % ("and|or", "and|or") + r"[,;]?\s*")
_BOTH = re.compile(r"[,;]?\s*" + _WORD_BETWEEN % ("and", "and") + r"[,;]?\s*")
_OR = re.compile(r"[,;]?\s*" + _WORD_BETWEEN % ("or", "or") + r"[,;]?\s*")


def opened(text: str) -> str:
    """Return an answer's text without its wrapping. Raises Nothing where it is empty, Refused where it is too long."""
    if len(text) > MAX_CHARACTERS:
        raise Refused(f"It has {len(text):,} characters; at most {MAX_CHARACTERS} are read.")
    body = tidy(text)
    if not body:
        raise Nothing("It is empty.")
    return body


def tidy(text: str) -> str:
    """Return an answer without delimiters, marks around it, spacing commands and a full stop at its end."""
    body = unadorned(text)
    for _ in range(MAX_WRAPPINGS):
        body = _unmarked(body)
    if "\\begin" not in body:
        # Text that went through JSON twice: `\\\\frac`.
        body = re.sub(r"\\{2}(?=[A-Za-z])", lambda _: "\\", body)
    body = joined(body)
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        size = len(opening) + len(closing)
        if len(body) > size and body.startswith(opening) and body.endswith(closing):
            inner = body[len(opening) : -len(closing)]
            # `$5 or $6` is not one pair of delimiters around an answer.
            if opening not in inner.replace("\\$", "") and not inner.endswith("\\"):
                body = _unmarked(inner)
                break
    # `11,\! 111`: the thin space pulls the digits of one number together.
    body = re.sub(r",\s*\\!\s*", ",", body)
    body = _SPACING.sub(lambda match: " " if match[0] in {"\\ ", "~"} else "", body)
    body = _ARRAY.sub(lambda match: rf"\begin{{pmatrix}}{match[1]}\end{{pmatrix}}", body)
    body = _ONE_LETTER.sub(r"\1", _UPRIGHT.sub(r"\\text{ \1}", body))
    body = re.sub(r"\s*\{,\s*\}", ",", body).replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    return re.sub(r"(?<!\\)\\$", "", plain_notation(body)).strip()


def with_commas(body: str) -> str:
    """Return a text with a comma in place of each `and` and `or` between values."""
    return _AND.sub(", ", body)


def together(body: str) -> list[str]:
    """Return what a text names on the two sides of each `and` between values."""
    return [part.strip() for part in _BOTH.split(body)]


def alternatives(body: str) -> list[str]:
    """Return what a text names on the two sides of each `or` between values."""
    return [part.strip() for part in _OR.split(body)]


_END = re.compile(
    r"(?:\\(?:[,;:! ]|q?quad)|[\s~])*+(?:(?<!\.)(?<![^\\],)[.,;])?+(?:\\(?:[,;:! ]|q?quad)|[\s~])*+$"
)
_MARKED = re.compile(
    r"\*\*(?P<bold>[^*]+)\*\*|`(?P<code>[^`]+)`|(?:\\(?:therefore|implies|Rightarrow|Longrightarrow|quad)(?![A-Za-z])|\\[,;: ]|=(?!=))(?P<rest>.+)"
)


def _unmarked(text: str) -> str:
    """Return an answer without what a writer puts around the whole of it: bold, a box, `=` before, `,` behind."""
    body = without_frame(_END.sub("", text.strip()))
    found = _MARKED.fullmatch(body)
    if found:
        return next(part for part in found.groups() if part).strip()
    boxed = boxes(body) if body.startswith("\\boxed{") else []
    whole = len(boxed) == 1 and boxed[0].end == len(body) and boxed[0].content
    return whole if whole and "\\boxed" not in whole else body


def split_top(text: str, mark: str) -> list[str]:
    """Return the parts between the marks that stand outside all brackets.

    A bracket closes whatever is open, as `[0, 1)` does. Refused when they do not balance.
    """
    return split_marked(text, re.compile(re.escape(mark)))[0]


def split_marked(text: str, mark: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Return the parts between marks outside all brackets, as `split_top`, and the marks."""
    parts: list[str] = []
    marks: list[str] = []
    depth = start = place = 0
    while place < len(text):
        character = text[place]
        found = mark.match(text, place) if depth == 0 else None
        if found is not None:
            parts.append(text[start:place])
            marks.append(found[0])
            start = place = found.end()
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
    return [*parts, text[start:]], marks
