"""Answers that are compared as text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from kapelle.grading.text.extraction import ExtractionRule, extract
from kapelle.grading.verdict import Grade, no_answer, right, wrong

# Between two letters or digits space separates: `1 2` is not 12.
_EMPTY_SPACE = re.compile(r"(?<!\w)\s+|\s+(?!\w)")


def composed(text: str) -> str:
    """Return a text with each letter and its accents as one character (NFC): both forms of it are the same text."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def plain_text(answer: str) -> str:
    """Return an answer without the space that means nothing in it, one is kept between words, its accents composed."""
    return _EMPTY_SPACE.sub("", " ".join(composed(answer).split()))


def grade_exact(text: str, gold: str, rules: Sequence[ExtractionRule]) -> Grade:
    """Return whether the final answer of a text is the gold one, letter by letter, space aside."""
    found = extract(text, rules)
    if found.text is None:
        return no_answer(found.problem)
    answer = plain_text(found.text)
    return right(answer) if answer == plain_text(gold) else wrong(answer, plain_text(gold))
