"""From a text to the answer in it, or to the verdict that it holds none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kapelle.grading.text.extraction import ExtractionRule, extract
from kapelle.grading.verdict import SHOWN, Grade, no_answer

T = TypeVar("T")


def read_answer(
    text: str, rules: Sequence[ExtractionRule], read: Callable[[str], T | None], otherwise: str
) -> T | Grade:
    """Return what `read` makes of the final answer of a text; the verdict `no_answer` where there is none.

    `read` returns None for what is no answer; the explanation then calls it `otherwise`.
    """
    found = extract(text, rules)
    if found.text is None:
        return no_answer(found.problem)
    answer = read(found.text)
    return no_answer(f"'{found.text[:SHOWN]}' is {otherwise}.") if answer is None else answer


def answer_in(text: str, rules: Sequence[ExtractionRule], read: Callable[[str], T | None]) -> T | None:
    """Return what `read` makes of the final answer of a text; None where there is none."""
    found = extract(text, rules).text
    return None if found is None else read(found)
