"""Answers that pick one of several options by its letter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kapelle.grading.text.exact import plain_text
from kapelle.grading.text.extraction import ExtractionRule, extract
from kapelle.grading.verdict import Grade, no_answer, right, wrong

MAX_CHARACTERS = 2_000

_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
# `B`, `(B)`, `[B]`, `B.`, `**B**`, and the option's own words behind it: `B) Paris`.
_LETTER = re.compile(r"[(\[*\s]*(?P<letter>[A-Za-z])(?:[)\]*.:\s]+(?P<words>.*))?", re.DOTALL)


def grade_choice(text: str, gold: str, options: Mapping[str, str], rules: Sequence[ExtractionRule]) -> Grade:
    """Return whether a text picks the option with the letter `gold`, and no other.

    `options` maps letters to their words; an answer may give the letter, or the letter and exactly those
    words. A letter with the words of another option picks none.
    """
    assert gold in options, "the gold letter is one of the options"
    found = extract(text, rules)
    if found.text is None:
        return no_answer(found.problem)
    if len(found.text) > MAX_CHARACTERS:
        return no_answer(
            f"The answer has {len(found.text):,} characters; at most {MAX_CHARACTERS:,} are read."
        )
    picked = _picked(found.text, options)
    if picked is None:
        return no_answer(f"'{found.text[:80]}' picks none of {', '.join(options)}.")
    return right(picked) if picked == gold else wrong(picked, gold)


def _picked(answer: str, options: Mapping[str, str]) -> str | None:
    answer = _WRAPPED.sub(r"\1", answer.strip().strip("$")).strip()
    match = _LETTER.fullmatch(answer)
    if match is None:
        return None
    letter = next((known for known in options if known.casefold() == match["letter"].casefold()), None)
    words = (match["words"] or "").strip(" .*\n")
    if letter is None or (words and plain_text(words).casefold() != plain_text(options[letter]).casefold()):
        return None
    return letter
