"""Texts in the arguments of tool calls: the same words whatever stands between them, the same numbers, the same formula.

The Berkeley Function Calling Leaderboard drops all of ` ,./-_*^` before it compares (BFCL v4, `standardize_string`). Two
texts that differ after that differ here. Of those that agree these are told apart, too: numbers that a mark changes (`1.5`
and `15`, `-5` and `5`, `2/3` and `23`), formulas (`x*y`, `x/y` and `x-y`), and words with other operators between them.
"""

from __future__ import annotations

import re

from kapelle.grading.text.exact import composed

_BETWEEN = re.compile(r"[ ,./_*^-]*")
_DATE = re.compile(
    r"(?<![0-9])([0-9]{4})([-/.])([0-9]{1,2})\2([0-9]{1,2})(?![0-9])"
    r"|(?<![0-9])([0-9]{1,2})([-/.])([0-9]{1,2})\6([0-9]{4})(?![0-9])"
)
_FUNCTIONS = frozenset({"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "abs", "pi", "lambda"})
_LETTERS = re.compile(r"[a-z]+")
_MATHEMATICS = re.compile(r"[0-9a-z\s.,:()+*/^=-]*")
_OPERATOR = re.compile(r"[*^+=/-]")
_ATTACHED = frozenset({"-", "."})
"""What may stand between a word and the number behind it, or not: `Bob-123`, `Jan.28`."""


def same_words(one: str, other: str) -> bool:
    """Return whether two texts say the same, letter case and what stands between words aside; symmetric."""
    left, right = (text.lower().replace("'", '"') for text in map(composed, (one, other)))
    if left == right:
        return True
    if is_formula(left) or is_formula(right):
        return _formula(left) == _formula(right)
    return _told_apart(left) == _told_apart(right) and _operators_agree(left, right)


def is_formula(text: str) -> bool:
    """Return whether a text is a formula: an operator, and of letters no more than names of one and functions."""
    if not _OPERATOR.search(text) or not _MATHEMATICS.fullmatch(text):
        return False
    runs = _LETTERS.findall(text)
    return bool(runs) and all(len(run) == 1 or run in _FUNCTIONS for run in runs)


def _formula(text: str) -> str:
    return re.sub(r"\s+", "", text).replace("**", "^").rstrip(".")


def _pieces(text: str) -> list[tuple[str, str]]:
    """Return each character that BFCL compares, with the marks before it; the end of the text is an empty one."""
    text = _DATE.sub(lambda date: "-".join(part for part in date.groups() if part and part.isdigit()), text)
    found: list[tuple[str, str]] = []
    place = 0
    while place <= len(text):
        between = _BETWEEN.match(text, place)
        assert between is not None, "nothing matches, too"
        place = between.end()
        found.append((between[0], text[place : place + 1]))
        place += 1
    return found


def _told_apart(text: str) -> list[tuple[str, str]]:
    """Return each character with what stands before it and changes a number."""
    pieces = _pieces(text)
    before = ["", *(character for _, character in pieces)]
    return [
        (_weight(left, between, right), right) for left, (between, right) in zip(before, pieces, strict=False)
    ]


def _weight(left: str, between: str, right: str) -> str:
    """Return the part of what stands between two characters that a number would not be the same without."""
    if not right.isdigit():
        return ""
    if left.isdigit():
        return re.sub("[ ,_]", "", between) or " " * bool(between)
    sign = re.split("[ ,_]", between)[-1]
    return "" if left and sign == between and sign in _ATTACHED else sign


def _operators_agree(one: str, other: str) -> bool:
    """Return whether no two different operators stand at the same place: `price/unit` is not `price*unit`."""
    marks = (re.sub("[ ,._]", "", between) for text in (one, other) for between, _ in _pieces(text))
    both = list(marks)
    half = len(both) // 2
    return all(
        not left or not right or left == right for left, right in zip(both[:half], both[half:], strict=True)
    )
