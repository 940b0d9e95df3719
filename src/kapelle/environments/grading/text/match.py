"""Compare answers as strings: exact matches, options chosen by letter, and regular expressions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from kapelle.environments.grading.processes import (
    AnswerLimits,
    KillableProcesses,
    ProcessFailed,
    TooCostly,
    serve,
)
from kapelle.environments.grading.text.extraction import ExtractionRule, extract, statements
from kapelle.environments.grading.verdict import Grade, no_answer, right, ungraded, wrong

# Space between two letters or digits is a separator: `1 2` is not 12.
_EMPTY_SPACE = re.compile(r"(?<!\w)\s+|\s+(?!\w)")


def composed(text: str) -> str:
    """Return a string in Unicode normal form NFC, in which a letter with its accents is one character."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def plain_text(answer: str) -> str:
    """Return an answer in Unicode normal form NFC and without white space, except for a single space between words."""
    return _EMPTY_SPACE.sub("", " ".join(composed(answer).split()))


def grade_exact(text: str, gold: str, rules: Sequence[ExtractionRule]) -> Grade:
    """Return whether the final answer of a text equals the gold answer, ignoring differences in white space."""
    found = extract(text, rules)
    if found.text is None:
        return no_answer(found.problem)
    answer = plain_text(found.text)
    return right(answer) if answer == plain_text(gold) else wrong(answer, plain_text(gold))


# -------- Answers that choose one of several options by letter

_MOST_OF_A_CHOICE = 2_000

# `B`, `(B)`, `[B]`, `B.`, `**B**`, `2`, also followed by the option's own words: `B) Paris`.
_LETTER = re.compile(
    r"[(\[*\s]*(?P<letter>[A-Za-z]|[0-9]{1,2})(?:(?:[)\]*.:,!\s]|[–-]\s)+(?:\((?P<inside>.*)\)|(?P<words>.*)))?",
    re.DOTALL,
)


def grade_choice(text: str, gold: str, options: Mapping[str, str], rules: Sequence[ExtractionRule]) -> Grade:
    """Return whether a text chooses the option with the letter `gold` and no other option.

    `options` is a mapping from the letter of each option to its words. An answer may give the letter, the exact words of the
    option, or both, alone or in a sentence (`The answer is B.`). An answer that combines a letter with the words of a different
    option is invalid.
    """
    assert gold in options, "the gold letter is one of the options"
    found = extract(text, rules)
    if found.text is None:
        return no_answer(found.problem)
    if len(found.text) > _MOST_OF_A_CHOICE:
        return no_answer(
            f"The answer has {len(found.text):,} characters; at most {_MOST_OF_A_CHOICE:,} are read."
        )
    picked = next(filter(None, (_picked(each, options) for each in statements(found.text))), None)
    if picked is None:
        return no_answer(f"'{found.text[:80]}' is none of the options {', '.join(options)}.")
    return right(picked) if picked == gold else wrong(picked, gold)


def _picked(said: str, options: Mapping[str, str]) -> str | None:
    """Return the letter of the option that is named by its letter, its words or both, or None if no option matches."""
    match = _LETTER.fullmatch(said)
    letter = match["letter"].casefold() if match else None
    words = _words(match["inside"] or match["words"] or "") if match else ""
    picked = next((known for known in options if known.casefold() == letter), None)
    if picked is not None and words in ("", _words(options[picked])):
        return picked
    named = [letter for letter, text in options.items() if _words(text) == _words(said)]
    return named[0] if len(named) == 1 else None


def _words(text: str) -> str:
    return plain_text(text.strip(" .*\n")).casefold()


# -------- Answers that must match a regular expression from the dataset

MAX_CHARACTERS = 10_000
"""Maximum number of characters in an answer that is matched with a regular expression."""


def regex_processes(size: int = 2, limits: AnswerLimits | None = None) -> KillableProcesses:
    """Return a pool of processes that match up to `size` regular expressions concurrently; further requests wait."""
    # The pool runs this module as a program; see the end of this file.
    return KillableProcesses("kapelle.environments.grading.text.match", size, limits)


def grade_regex(
    text: str, pattern: str, rules: Sequence[ExtractionRule], processes: KillableProcesses
) -> Grade:
    """Return whether the entire final answer of a text matches a regular expression.

    The match runs in a process that can be killed. If matching exceeds the time limit, the verdict is `no_answer`; if the
    process crashes, the verdict is `ungraded`. Raises ValueError for an invalid pattern, which is an error in the dataset.
    """
    try:
        re.compile(pattern)
    except re.error as problem:
        raise ValueError(
            f"'{pattern[:80]}' is not a valid regular expression: {problem}. Fix the dataset."
        ) from None
    found = extract(text, rules)
    if found.text is None:
        return no_answer(found.problem)
    answer = found.text
    if len(answer) > MAX_CHARACTERS:
        return no_answer(
            f"The answer has {len(answer):,} characters; at most {MAX_CHARACTERS:,} are matched."
        )
    try:
        matches = processes.ask({"pattern": pattern, "text": answer})
    except TooCostly as problem:
        return no_answer(f"'{answer[:80]}' cannot be matched. {problem}")
    except ProcessFailed as problem:
        return ungraded(answer, f"'{pattern[:80]}' could not be matched. {problem}")
    return right(answer) if matches else wrong(answer, f"any text that matches {pattern}")


if __name__ == "__main__":
    serve(lambda question: re.fullmatch(question["pattern"], question["text"]) is not None)
