"""Thoughts of a completion: the text between markers at its beginning, before the answer."""

from __future__ import annotations

from collections.abc import Sequence

THOUGHTS = ("<think>", "</think>")
"""The markers of most models."""
THOUGHTS_OF_MISTRAL = ("[THINK]", "[/THINK]")
EVERY_PAIR = (THOUGHTS, THOUGHTS_OF_MISTRAL)
OPENINGS = tuple(opening for opening, _ in EVERY_PAIR)
THOUGHT_MARKS = frozenset((*THOUGHTS, *THOUGHTS_OF_MISTRAL))


def split_thoughts(
    text: str, around: Sequence[tuple[str, str]] = EVERY_PAIR, *, thinking: bool
) -> tuple[str, str, bool]:
    """Return thoughts, the rest of the text, and whether the thoughts are complete (or there are none).

    With `thinking`, the prompt has opened the thoughts, so the text contains only their end.
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
