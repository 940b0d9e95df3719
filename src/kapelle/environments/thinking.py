"""Reasoning before a move: `<think>…</think>`, then the move.

The move is read after the last `</think>`, so that nothing written inside is ever made. A `<think>` that is not
closed leaves no move, wherever it stands. An opening tag may be missing: chat templates put it into the prompt.
"""

from __future__ import annotations

import re

_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)

INVITATION = "You may think first, between <think> and </think>; only what you write after that is your move."
"""What a player reads where thinking is allowed."""


def spoken(text: str) -> str | None:
    """Return a text without its thinking: what follows the last `</think>`. None where a `<think>` is not closed."""
    tags = list(_TAG.finditer(text))
    if not tags:
        return text
    return text[tags[-1].end() :] if tags[-1][1] else None


def without_tags(text: str) -> str:
    """Return a text without the tags themselves."""
    return _TAG.sub("", text)
