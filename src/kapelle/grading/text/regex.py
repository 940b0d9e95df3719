"""Answers that must match a regular expression of the data set."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kapelle.grading.processes import Answering, AnswerLimits, GaveUp, KillableProcesses, TooCostly
from kapelle.grading.text.extraction import ExtractionRule, extract
from kapelle.grading.verdict import Grade, no_answer, right, ungraded, wrong

MAX_CHARACTERS = 10_000
"""Characters of an answer that is matched; most patterns take time in proportion, some far more."""


def regex_processes(size: int = 2, limits: AnswerLimits | None = None) -> KillableProcesses:
    """Return a pool that matches regular expressions; at most `size` at a time, others wait."""
    return KillableProcesses("kapelle.grading.text.regex_worker", size, limits)


def grade_regex(text: str, pattern: str, rules: Sequence[ExtractionRule], processes: Answering) -> Grade:
    """Return whether the whole final answer of a text matches a pattern.

    A pattern that backtracks for too long on this answer makes it `ungraded`: it runs in a process that
    is killed. ValueError for a pattern that is none; it is the data set's, so that is said at once.
    """
    try:
        re.compile(pattern)
    except re.error as problem:
        raise ValueError(
            f"'{pattern[:80]}' is not a regular expression: {problem}. Fix the data set."
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
    except GaveUp as problem:
        return ungraded(answer, f"'{pattern[:80]}' could not be matched. {problem}")
    return right(answer) if matches else wrong(answer, f"what matches {pattern}")
