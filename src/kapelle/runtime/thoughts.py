"""Separate the thoughts of a completion, which are the text between two markers at its beginning, from the answer."""

from __future__ import annotations

from collections.abc import Sequence

THOUGHTS = ("<think>", "</think>")
"""The markers of thoughts that most models use."""
THOUGHTS_OF_MISTRAL = ("[THINK]", "[/THINK]")
EVERY_PAIR = (THOUGHTS, THOUGHTS_OF_MISTRAL)
OPENINGS = tuple(opening for opening, _ in EVERY_PAIR)
THOUGHT_MARKS = frozenset((*THOUGHTS, *THOUGHTS_OF_MISTRAL))


def split_thoughts(
    text: str, around: Sequence[tuple[str, str]] = EVERY_PAIR, *, thinking: bool
) -> tuple[str, str, bool]:
    """Return the thoughts, the rest of the text, and whether the thoughts are complete (or absent).

    With `thinking`, the prompt already contains the start marker of the thoughts, so the text contains only the end marker.
    """
    begun = text.lstrip()
    opened = [pair for pair in around if begun.startswith(pair[0])]
    if not opened and not thinking:
        return "", text, True
    inner = begun.removeprefix(opened[0][0]) if opened else begun
    ends = [(place, closing) for _, closing in opened or around if (place := inner.find(closing)) >= 0]
    if not ends:
        return inner.strip(), "", False
    place, closing = min(ends)
    return inner[:place].strip(), inner[place + len(closing) :].lstrip(), True
